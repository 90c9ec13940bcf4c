"""Memory of a daemon: the ledger of `--mem`, the arena's slots, and who holds which block."""
