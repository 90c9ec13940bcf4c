"""Layouts that `ingest` reads, one module each."""
