"""Stages in a journalled run: memory, disk, progress, work folder."""
