"""The script of `python -m pipeline completion` in a real bash: what it offers when TAB is pressed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.__main__ import COMMANDS
from tests.helpers.support import assert_one_line_error, command

# Prints what is offered for the last word. If completing ran Python, that would be an error: PATH has none.
_ASK = """
{before}
source {script}
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
{function} "${{COMP_WORDS[0]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    done = command("-m", "pipeline", "completion", "bash")
    assert done.returncode == 0, done.stderr
    path = tmp_path_factory.mktemp("completion") / "completion.bash"
    path.write_text(done.stdout)
    return path


def offered(script: Path, *words: str, before: str = "") -> list[str]:
    """As completed by the function that bash has registered for the first word. `before`: what bash ran earlier."""
    bash = shutil.which("bash")
    assert bash is not None
    registered = subprocess.run(
        [bash, "--norc", "-c", f"{before}\nsource {script}; complete -p {words[0]}"],
        capture_output=True,
        text=True,
        check=True,
    )
    options = shlex.split(registered.stdout)
    function = options[options.index("-F") + 1]
    text = _ASK.format(before=before, script=script, words=shlex.join(words), function=function)
    done = subprocess.run(
        [bash, "--norc", "-c", text], capture_output=True, text=True, check=True, env={"PATH": "/nonexistent"}
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_tasks_and_settings_of_luigi(script: Path) -> None:
    luigi = ("luigi", "--module", "pipeline")
    assert offered(script, *luigi, "Bert") == ["BertPhase1", "BertPhase2"]
    assert {"Nightly", "Sweep", "Pretrain"} <= set(offered(script, *luigi, ""))
    assert offered(script, *luigi, "Pretrain", "--Phase1-lr") == ["--Phase1-lr"]
    assert {"--Phase1-max-steps", "--Phase1-max-pred-len"} <= set(offered(script, *luigi, "Pretrain", "--Phase1-max"))
    assert offered(script, "luigi", "--module", "other", "Bert") == []


def test_commands_and_their_options(script: Path) -> None:
    for python in ("python", "python3"):
        assert set(offered(script, python, "-m", "pipeline", "")) == set(COMMANDS)
    assert offered(script, "python", "-m", "pipeline", "do") == ["doctor"]
    assert offered(script, "python", "-m", "pipeline", "status", "--wa") == ["--watch"]
    assert offered(script, "python", "-m", "pipeline", "why", "Merge") == ["MergeShards"]
    assert "--Cluster-device" in offered(script, "python", "-m", "pipeline", "status", "--Cluster-")
    assert offered(script, "python", "-m", "other", "") == []
    assert offered(script, "python", "script.py", "st") == []


@pytest.mark.parametrize(
    "before",
    [
        "complete -o nospace -F _other python",
        '_load() { complete -F _other "$1"; return 124; }; complete -o default -D -F _load',  # as bash-completion does
    ],
    ids=["loaded", "loaded when first asked"],
)
@pytest.mark.parametrize("times", [1, 2])
def test_what_completed_python_before_still_does(script: Path, before: str, times: int) -> None:
    before = '_other() { COMPREPLY=(other "$1"); }\n' + "\n".join([before, *[f"source {script}"] * (times - 1)])
    assert offered(script, "python", "script.py", "st", before=before) == ["other", "python"]
    assert offered(script, "python", "-m", "pipeline", "do", before=before) == ["doctor"]


def test_what_is_offered_is_taken(script: Path) -> None:
    """Luigi's own parser knows every setting that the script offers."""
    names = offered(script, "luigi", "--module", "pipeline", "BertPhase2", "--")
    assert len(names) > 100
    program = (
        "import pipeline, json\nfrom luigi.cmdline_parser import CmdlineParser\n"
        "known = CmdlineParser._build_parser()._option_string_actions\n"
        f"print([name for name in {names} if name not in known])"
    )
    found = command("-c", program).stdout.strip()
    assert found == "['--phase', '--date', '--grid']"  # options of single tasks


def test_zsh_has_the_same_with_its_way_to_take_it() -> None:
    """Run by zsh only where zsh is installed."""
    text = command("-m", "pipeline", "completion", "zsh").stdout
    assert "bashcompinit" in text.partition("_bert_commands")[0]
    zsh = shutil.which("zsh")
    if zsh is not None:
        done = subprocess.run([zsh, "-f", "-c", text], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_another_shell_is_one_line() -> None:
    assert_one_line_error(command("-m", "pipeline", "completion", "fish"), "allowed: bash, zsh", status=35)
