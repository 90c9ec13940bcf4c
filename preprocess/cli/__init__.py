"""The `blockstore` command: its options and output."""
