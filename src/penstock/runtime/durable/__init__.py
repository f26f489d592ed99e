"""Durable runs: runs that continue after the process working on them has died."""
