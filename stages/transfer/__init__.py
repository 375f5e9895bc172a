"""File transfer from local paths, HTTP, S3 and archives; the checkpoints that convert and merge read."""
