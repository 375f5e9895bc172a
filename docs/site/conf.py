"""The pages of this repository, and the API from the code's docstrings, as a site: `make docs`."""

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
