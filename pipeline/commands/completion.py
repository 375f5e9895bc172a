"""`python -m pipeline completion bash`: a script that completes tasks, settings and commands.

All names are in the script: nothing is imported when TAB is pressed. Print it again after an update.
"""

from __future__ import annotations

import argparse
import textwrap

from common.errors import UserError
from pipeline.settings.sections import SECTIONS
from pipeline.tasks.everything import TASKS
from pipeline.tasks.nights.nightly import Nightly
from pipeline.tasks.sweep import Sweep

SUMMARY = "a script for your shell that completes tasks, settings and commands"
SHELLS = ("bash", "zsh")
#: What each shell runs at its start; zsh takes bash's functions.
_HEADERS = {
    "bash": "# source <(python -m pipeline completion bash)",
    "zsh": "# source <(python -m pipeline completion zsh)\nautoload -U +X compinit && compinit -u\n"
    "autoload -U +X bashcompinit && bashcompinit",
}
_SCRIPT = """
_bert_commands=({commands})
_bert_tasks=({tasks})
_bert_settings=({settings})
_bert_options() {{
  case "$1" in
{options}
  esac
}}

# Offer those of the words that begin with the one before the cursor.
_bert_offer() {{
  COMPREPLY=($(compgen -W "$1" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}

_bert_luigi() {{
  COMPREPLY=()
  case " ${{COMP_WORDS[*]}} " in
    *" --module pipeline "*) ;;
    *) return ;;
  esac
  case "${{COMP_WORDS[COMP_CWORD]}}" in
    -*) _bert_offer "${{_bert_settings[*]}}" ;;
    *) _bert_offer "${{_bert_tasks[*]}}" ;;
  esac
}}

# The function that completes a command, if there is one; where that is ours, the one before it.
_bert_function() {{
  local registered
  registered=$(complete -p "$@" 2>/dev/null)
  registered=${{registered#* -F }}
  case "${{registered%% *}}" in
    complete) ;;
    _bert_*) echo "$_bert_other" ;;
    *) echo "${{registered%% *}}" ;;
  esac
}}

# What completes python otherwise, in bash. bash-completion loads its own function when a command is first completed.
if [ -n "$BASH_VERSION" ]; then
  _bert_loader=$(_bert_function -D)
  if [ -n "$_bert_loader" ] && ! complete -p python >/dev/null 2>&1; then
    "$_bert_loader" python >/dev/null 2>&1
  fi
  _bert_other=$(_bert_function python)
fi

_bert_python() {{
  COMPREPLY=()
  if [ "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" != "-m pipeline" ]; then
    [ -z "$_bert_other" ] || "$_bert_other" "$@"
    return
  fi
  if [ "$COMP_CWORD" -eq 3 ]; then
    _bert_offer "${{_bert_commands[*]}}"
  elif [ "$COMP_CWORD" -gt 3 ]; then
    case "${{COMP_WORDS[COMP_CWORD]}}" in
      -*) _bert_offer "$(_bert_options "${{COMP_WORDS[3]}}") ${{_bert_settings[*]}}" ;;
      *) case "${{COMP_WORDS[3]}}" in why|doctor|manifest) _bert_offer "${{_bert_tasks[*]}}" ;; esac ;;
    esac
  fi
}}

complete -o default -F _bert_luigi luigi
complete -o default -F _bert_python python python3
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="|".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    """Raises `UserError`."""
    if args.shell not in SHELLS:
        raise UserError(f"there is no script for {args.shell}; allowed: {', '.join(SHELLS)}")
    (commands,) = (action for action in args.parser._actions if isinstance(action, argparse._SubParsersAction))
    options = "\n".join(
        f'    {name}) echo "{" ".join(_long(command))}" ;;' for name, command in commands.choices.items()
    )
    settings = [
        f"--{section.__name__}-{name.replace('_', '-')}" for section in SECTIONS for name, _ in section.get_params()
    ]
    words = {
        "commands": list(commands.choices),
        "tasks": [task.__name__ for task in (*TASKS, Nightly, Sweep)],
        "settings": [*settings, "--phase", "--date", "--grid", "--workers"],
    }
    lists = {name: _wrapped(found) for name, found in words.items()}
    print(_HEADERS[args.shell] + _SCRIPT.format(**lists, options=options), end="")
    return 0


def _long(parser: argparse.ArgumentParser) -> list[str]:
    return [name for name in parser._option_string_actions if name.startswith("--")]


def _wrapped(words: list[str]) -> str:
    return "\n  ".join(textwrap.wrap(" ".join(words), 116, break_on_hyphens=False))
