"""Batches of propagated features (all hops of a node as rows), and models for them."""
