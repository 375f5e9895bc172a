"""Stage directories on disk and the states derived from them."""
