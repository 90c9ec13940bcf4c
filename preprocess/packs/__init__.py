"""Epochs packed ahead of training: the only folder of this package that depends on `loaderd`."""
