"""Micrographs: batches cut by the ranks that own their seeds, and models that visit them."""
