"""Token ids → training examples: segment pairs, masking, packing, and shard files; counts over such examples."""
