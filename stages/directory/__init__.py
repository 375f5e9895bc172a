"""The stage directory: manifest, lock, attempts, progress and records."""
