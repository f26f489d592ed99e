"""Answers of providers, read within bounds: how many tokens they have, and how much of them is read."""
