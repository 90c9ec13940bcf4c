"""Faults in a daemon and in trainers, and checks of what must hold afterwards."""
