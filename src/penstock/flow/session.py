"""Nodes by name, for graphs that refer to them."""

from __future__ import annotations

from typing import Any

from penstock import checks
from penstock.errors import InvalidValue


class Session:
    """A set of nodes that live longer than one run: terminals, browsers, graphs."""

    def __init__(self, name: str = "default") -> None:
        checks.text("name", name, minimum=1)
        self.name = name
        self._nodes: dict[str, Any] = {}

    def register(self, node: Any) -> None:
        """Make the node known by its id; an id is taken once."""
        named = getattr(node, "id", None)
        if not isinstance(named, str) or not named:
            raise InvalidValue("node", node, "an object with an id")
        if not callable(getattr(node, "execute", None)):
            raise InvalidValue(f"node {named!r}", node, "an object with execute(context)")
        if self._nodes.get(named, node) is not node:
            raise InvalidValue("node", named, f"one whose id is not taken in session {self.name!r}")
        self._nodes[named] = node

    def unregister(self, node_id: str) -> None:
        """Forget the node, if it is known."""
        self._nodes.pop(node_id, None)

    def get_node(self, node_id: str) -> Any | None:
        """The node of that id; None if there is none."""
        return self._nodes.get(node_id)

    def list_nodes(self) -> list[str]:
        """The ids of all nodes, in the order they were registered."""
        return list(self._nodes)

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._nodes

    def __repr__(self) -> str:
        return f"<Session {self.name!r} with {len(self._nodes)} node(s)>"
