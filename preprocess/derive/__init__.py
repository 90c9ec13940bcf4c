"""Derived features: a new array computed from the rows of neighbors."""
