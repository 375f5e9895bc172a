"""How one training run is spread over workers."""
