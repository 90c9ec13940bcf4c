"""Sessions of the engine: one file for each kind, and the engine that serves them by number."""
