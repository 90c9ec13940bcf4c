"""Memory of a daemon: the ledger of `--mem`, the arena's slots, and the blocks they hold."""
