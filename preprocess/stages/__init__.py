"""The stages of an ingest, one module each, every one within the memory budget."""
