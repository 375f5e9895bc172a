"""A shared store of complete stages and of checkpoints, by fingerprint: a folder or S3."""
