"""Where the curves of a training are shown: one tracker, one file, by the names in `trainer/registry.py`."""
