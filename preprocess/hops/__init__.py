"""Propagated features: hops of operators into a store, out of core."""
