"""Servers that answer a constant, one module for each peer, and the load they get."""
