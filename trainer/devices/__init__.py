"""One file for each kind of hardware. The loop sees only `base.Device`."""
