"""Random and mutated messages against a real daemon."""
