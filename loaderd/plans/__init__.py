"""Plans: pure functions from resolved parameters and a position to units of work."""
