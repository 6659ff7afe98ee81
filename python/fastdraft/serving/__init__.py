"""Adapters into decoding loops that others own: a module a host, importing that host alone."""
