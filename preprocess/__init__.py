"""The pipeline behind the `blockstore` command: it turns a source graph into a store."""
