"""Advice: try plans on the store's own files, and report the results."""
