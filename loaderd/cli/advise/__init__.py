"""Advice: plans tried over the store's own files, and what came of it."""
