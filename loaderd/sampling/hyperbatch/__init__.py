"""Hyperbatches: many batches sampled together, their rows brought in together (AGNES)."""
