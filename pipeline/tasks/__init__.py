"""Luigi tasks: what runs after what."""
