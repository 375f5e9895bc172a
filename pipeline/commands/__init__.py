"""python -m pipeline COMMAND: one file a command."""
