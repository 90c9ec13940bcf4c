"""Epochs that were sampled beforehand, with the rows that their batches want."""
