"""Packed epochs: sampled beforehand, with the rows that their batches want."""
