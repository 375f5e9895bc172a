"""python -m pipeline COMMAND: one file per command."""
