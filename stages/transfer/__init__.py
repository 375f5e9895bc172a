"""File transfer from local paths, HTTP, S3 and archives."""
