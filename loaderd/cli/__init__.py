"""The `loaderd` command: its options, its configuration file and `advise`."""
