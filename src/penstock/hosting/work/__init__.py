"""One run, while a host works on it."""
