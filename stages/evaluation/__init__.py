"""Evaluation of a trained model on held-out examples."""
