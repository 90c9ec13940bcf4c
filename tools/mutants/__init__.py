"""Faults planted one at a time, to see whether the tests of the same folder notice."""
