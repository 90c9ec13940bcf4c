"""Macro-batches: some partitions at a time, sampled inside what is loaded (HANOI)."""
