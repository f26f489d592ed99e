"""Databases under one port: SQLite in a file, PostgreSQL by URL; and the versions of what is in them."""
