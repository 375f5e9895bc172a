"""Checkpoints: file formats, saving, resuming and pruning."""
