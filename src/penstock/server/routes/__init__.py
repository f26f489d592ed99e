"""The routes, one file per resource; `server.auth.ACCESS` defines the role that each requires."""
