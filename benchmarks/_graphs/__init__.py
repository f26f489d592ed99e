"""Graphs to run, those who run them, and how they are timed: one module per contestant."""
