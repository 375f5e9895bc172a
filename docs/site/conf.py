"""The pages of this repository, and the API from the code's docstrings, as a site: `make docs`."""

from __future__ import annotations

import builtins
from typing import Any

from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain

project = "BERT pretraining pipeline"
extensions = [
    "myst_parser",
    "autodoc2",
    "sphinxcontrib.mermaid",
]
root_doc = "docs/site/index"
include_patterns = ["*.md", "docs/*.md", "docs/site/**"]
html_theme = "alabaster"
html_title = project

# Headings have the anchors that GitHub gives them; ```mermaid is a drawing.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

autodoc2_packages = ["common", "trainer", "stages", "pipeline"]
autodoc2_output_dir = "docs/site/api"
autodoc2_render_plugin = "myst"  # docstrings are Markdown
autodoc2_hidden_objects = {"private", "dunder", "inherited"}


class _Domain(PythonDomain):
    """In a signature, `bytes` is Python's and not an attribute of that name, of which Sphinx would take any."""

    def find_obj(self, env: Any, modname: Any, classname: Any, name: str, *rest: Any) -> Any:
        return [] if hasattr(builtins, name) else super().find_obj(env, modname, classname, name, *rest)


def setup(app: Sphinx) -> None:
    app.add_domain(_Domain, override=True)
