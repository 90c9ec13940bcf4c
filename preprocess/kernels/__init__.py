"""Compiled kernels of the pipeline, one module for each subject."""
