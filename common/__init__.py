"""Shared by all packages; imports neither torch nor luigi."""
