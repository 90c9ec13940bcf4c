"""A store back into a plain layout."""
