"""What a graph is: nodes, handles, edges, channels.

Frozen data, and what can be wrong with it. Knows no domain: what a node type does is its executor's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from penstock.errors import PenstockError

Channel = Literal["flow", "link"]
"""`flow` carries values from a node that ran to one that runs next; `link` wires an artifact into its consumer."""

CHANNELS: tuple[Channel, ...] = get_args(Channel)
DEFAULT_OUTPUT = "output"
DEFAULT_INPUT = "input"

MAX_NODES = 100_000
MAX_EDGES = 1_000_000
MAX_NAME_LENGTH = 500
MAX_PROBLEMS = 10_000
"""So many are listed; a graph with more is not looked at further."""

SHOWN_PROBLEMS = 10


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A vertex: its id, the type that says which executor is behind it, and that executor's settings."""

    id: str
    type: str
    data: Mapping[str, Any] = field(default_factory=dict)
    position: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class EdgeSpec:
    """A connection from one node's output handle to another node's input handle, on one channel."""

    id: str
    source: str
    target: str
    channel: Channel
    source_handle: str = DEFAULT_OUTPUT
    target_handle: str = DEFAULT_INPUT


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """A graph as it is written down; whether it can run is `validate`'s question."""

    nodes: tuple[NodeSpec, ...] = ()
    edges: tuple[EdgeSpec, ...] = ()
    id: str = "graph"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a graph: a code for programs, a path into its JSON, a sentence for people."""

    code: str
    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"


def shown(value: object) -> str:
    """`value` in a sentence: short, and whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an int of 5,000 digits, a broken __repr__
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def thawed(value: Any) -> Any:
    """A copy in plain dicts and lists, which may be changed."""
    if type(value) is str:
        return value
    if isinstance(value, (dict, Mapping)):  # a dict is recognised immediately, a Mapping takes a subclass check
        return {key: thawed(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [thawed(one) for one in value]
    return value


class GraphInvalid(PenstockError):
    """A graph that cannot be read or cannot run; `problems` has all that is wrong with it, up to MAX_PROBLEMS."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        shown = [f"[{problem.code}] {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
        if len(self.problems) > SHOWN_PROBLEMS:
            shown.append(f"and {len(self.problems) - SHOWN_PROBLEMS} more")
        super().__init__(f"the graph has {len(self.problems)} problem(s):\n  " + "\n  ".join(shown))
