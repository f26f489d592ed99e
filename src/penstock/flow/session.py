"""Nodes by name, for graphs that refer to them."""

from __future__ import annotations

from typing import Any

from penstock import checks
from penstock.errors import InvalidValue


class Session:
    """A set of nodes that outlive single runs: terminals, browsers, graphs."""

    def __init__(self, name: str = "default") -> None:
        checks.text("name", name, minimum=1)
        self.name = name
        self._nodes: dict[str, Any] = {}

    def register(self, node: Any) -> None:
        """Register the node under its id, which no other node of the session may have."""
        named = getattr(node, "id", None)
        if not isinstance(named, str) or not named:
            raise InvalidValue("node", node, "an object with an id")
        if not callable(getattr(node, "execute", None)):
            raise InvalidValue(f"node {named!r}", node, "an object with execute(context)")
        if self._nodes.get(named, node) is not node:
            raise InvalidValue("node", named, f"one whose id is not taken in session {self.name!r}")
        self._nodes[named] = node

    def unregister(self, node_id: str) -> None:
        """Remove the node, if it is registered."""
        self._nodes.pop(node_id, None)

    def get_node(self, node_id: str) -> Any | None:
        """Return the node with that id; None if there is none."""
        return self._nodes.get(node_id)

    def list_nodes(self) -> list[str]:
        """Return the ids of all nodes, in the order in which they were registered."""
        return list(self._nodes)

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._nodes

    def __repr__(self) -> str:
        return f"<Session {self.name!r} with {len(self._nodes)} node(s)>"
