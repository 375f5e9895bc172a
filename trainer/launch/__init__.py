"""Starting the workers of a run, and stopping them."""
