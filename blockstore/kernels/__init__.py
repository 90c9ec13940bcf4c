"""Kernels over flat arrays: serial, `nogil`, one per worker thread."""
