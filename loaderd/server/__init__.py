"""Sockets, connections and owners: between clients and the sessions; it decides nothing."""
