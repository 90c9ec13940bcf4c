"""Moves batches to a device by copies or gathers while the trainer works."""
