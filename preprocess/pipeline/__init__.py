"""Runs of journalled stages: their plan, disk space, progress display and work folder."""
