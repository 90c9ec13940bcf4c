"""What the daemon is asked, and where its answers lie."""
