"""The programs: each is run with the base URL of a server, in an environment of its own."""
