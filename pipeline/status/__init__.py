"""What is on the disk, and the state that it shows."""
