"""The stages: each a function and a command, `python -m stages.NAME --help`."""
