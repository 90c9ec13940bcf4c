"""Hop-wise batches: rows of propagated features, in memory or read for each batch."""
