"""Connections to daemons: endpoints, requests, sessions, positions and memory for batches."""
