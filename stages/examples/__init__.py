"""Token ids to rows: pairs of segments, masks, packing, and the shards they are written to."""
