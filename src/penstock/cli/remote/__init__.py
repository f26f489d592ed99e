"""Commands that talk to a running server: `penstock runs …`, `penstock chat`."""
