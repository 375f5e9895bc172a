"""Where the curves of a training are shown: one file for each tracker, by the names in `trainer/registry.py`."""
