"""Faults of a daemon and of trainers, and what must hold afterwards."""
