"""How files come from elsewhere: local paths, HTTP, S3, archives."""
