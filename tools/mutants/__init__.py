"""Mutation testing: plant faults one at a time, and see whether tests of that folder fail."""
