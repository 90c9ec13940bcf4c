"""Rows of propagated features: hop-wise batches, and models for them."""
