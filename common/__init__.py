"""What all packages stand on; imports neither torch nor luigi."""
