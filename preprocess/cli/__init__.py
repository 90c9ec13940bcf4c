"""The `blockstore` command: its options, and what it shows."""
