"""Sessions of clients on lines of the engine that they share."""
