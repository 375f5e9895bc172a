"""Measuring a trained model on examples that it has not seen."""
