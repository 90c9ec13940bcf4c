"""Partitions, hubs and halos: settings, costs, stages and reports."""
