"""What each stage does: a function, and the command `python -m stages.NAME --help`."""
