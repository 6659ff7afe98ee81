"""Random cases of everything that must hold, for as long as you like: `make campaign`."""
