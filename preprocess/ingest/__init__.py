"""Ingest a source into a store: plan what will be written, and run the stages that write it."""
