"""Streams of batches that several sessions of clients share."""
