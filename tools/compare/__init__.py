"""Accuracy of training on a daemon's batches against other loaders, in pairs of runs."""
