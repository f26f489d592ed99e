"""Scripts that measure this tree; no part of the package."""
