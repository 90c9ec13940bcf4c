"""Micrographs (LeapGNN): batches divided by the owners of their seeds, which models visit."""
