"""A daemon as people and tools see it: metrics, live page, terminal view, checks."""
