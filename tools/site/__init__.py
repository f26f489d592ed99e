"""The documentation site: `make docs` builds it from `docs/`, the code, and `mkdocs.yml`."""
