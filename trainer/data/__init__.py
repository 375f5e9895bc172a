"""What the model is fed: the shard format, the order of samples, and the loader."""
