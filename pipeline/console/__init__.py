"""What a run shows: to a person at a terminal, in a log, or as JSON lines to a program."""
