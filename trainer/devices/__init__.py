"""One kind of hardware, one file. The loop sees `base.Device` only."""
