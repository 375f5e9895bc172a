"""What a stage directory is: its manifest, lock, attempts, progress and records."""
