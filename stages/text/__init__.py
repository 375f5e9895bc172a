"""Where documents come from: one file a format."""
