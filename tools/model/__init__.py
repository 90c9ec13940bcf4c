"""Predicts bytes and seconds of an epoch by plan, from degrees and sizes: docs/scale.md."""
