"""Sources of documents, one module per format."""
