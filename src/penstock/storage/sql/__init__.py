"""Stores over any `Database`: each port once, in SQL that SQLite and PostgreSQL both understand."""
