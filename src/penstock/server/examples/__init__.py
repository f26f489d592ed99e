"""Built-in content of a new server: a model that needs no API key, and graphs that use it."""

from __future__ import annotations

from penstock.server.examples.graphs import EXAMPLES, SHIPPED, example_graphs
from penstock.server.examples.model import EXAMPLE_PRICE, ExampleModel

__all__ = ["EXAMPLES", "EXAMPLE_PRICE", "SHIPPED", "ExampleModel", "example_graphs"]
