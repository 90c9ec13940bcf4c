"""The algorithms of the ingest stages, one module each, all within the memory budget."""
