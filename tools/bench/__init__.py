"""Measurements: `python -m tools.bench NAME`; a run gives one JSON line per side."""
