"""Code shared by checkpoint conversion and merging."""
