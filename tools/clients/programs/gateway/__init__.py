"""Programs that know nothing of a gateway: each is run with the provider's address, and under `penstock exec`."""
