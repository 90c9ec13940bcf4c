"""Kernels of the pipeline, one module each for edges, levels, rows and generated graphs."""
