"""Sources in, a store out: the pipeline behind the `blockstore` command."""
