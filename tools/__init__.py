"""Benchmarks, reports and checks, run from the repository."""
