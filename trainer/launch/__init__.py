"""Starting and stopping the workers of a run."""
