"""Propagated features: apply operators repeatedly to features of a store, out of core."""
