"""The daemon: plans, engine, sessions, ledger and transport behind the `loaderd` command."""
