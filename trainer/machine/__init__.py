"""Whether this machine can train: what it has (`--doctor`), and whether it computes correctly (`--self-test`)."""
