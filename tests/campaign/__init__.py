"""Random cases of everything that must hold: some in the test suite, many in `make campaign`."""
