"""Epochs packed ahead of training: the one folder of this package that builds on `loaderd`."""
