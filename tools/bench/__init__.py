"""Measurements: `python -m tools.bench NAME`; a run is one JSON line a peer."""
