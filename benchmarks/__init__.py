"""Benchmarks: each speed claim as a command that measures both sides in one run and prints their ratio."""
