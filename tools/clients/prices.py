"""Prices of the fake provider's models, for programs under `penstock exec`."""

from penstock import Price

prices = {"fake-1": Price("3", "15"), "dear-1": Price("9000000", "9000000")}
