"""Batches on a device: packed, copied or gathered there, while the trainer works."""
