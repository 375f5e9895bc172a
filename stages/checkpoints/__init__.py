"""What converting and merging checkpoints share."""
