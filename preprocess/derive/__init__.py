"""Derived features: one more array, out of neighbors' rows."""
