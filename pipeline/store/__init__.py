"""The shared store, as luigi uses it."""
