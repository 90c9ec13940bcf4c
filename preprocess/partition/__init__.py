"""Partitions, hubs, halos and owner maps: settings, costs, stages and reports."""
