"""Export a store to a plain layout."""
