"""Hop-wise batches: rows of propagated features, read or in memory."""
