"""How gradients become new parameters."""
