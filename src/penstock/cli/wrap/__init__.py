"""A program of any language as a contained child process: `penstock exec`."""
