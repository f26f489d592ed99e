"""The routes, one file per thing; `server.auth.ACCESS` says who may use each."""
