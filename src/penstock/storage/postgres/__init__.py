"""PostgreSQL: the database at a URL, and the ledger in the same database."""
