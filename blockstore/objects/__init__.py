"""Stores in object storage: pages kept on local disk, and stores pushed and pulled."""
