"""Counts over the text of a data set."""
