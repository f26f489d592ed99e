"""SQLite: the database in a file, and the ledger in another."""
