"""Evaluation of a trained model on held-out examples."""

#: The files of BLiMP's sets; ._x.jsonl are macOS' attributes of x.jsonl.
BLIMP_SETS = "[!.]*.jsonl"
