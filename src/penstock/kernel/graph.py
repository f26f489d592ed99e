"""Graphs as data: nodes, handles, edges, channels, and the problems a graph can have.

Frozen data. Knows no domain: what a node type does is the business of its executor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from penstock.errors import PenstockError

Channel = Literal["flow", "link"]
"""`flow` carries values from a node that ran to the next; `link` wires an artifact into its consumer."""

CHANNELS: tuple[Channel, ...] = get_args(Channel)
DEFAULT_OUTPUT = "output"
DEFAULT_INPUT = "input"

MAX_NODES = 100_000
MAX_EDGES = 1_000_000
MAX_NAME_LENGTH = 500
MAX_PROBLEMS = 10_000
"""Maximum number of problems in a list; the checks stop there."""

SHOWN_PROBLEMS = 10


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A vertex: its id, the type that selects its executor, and the settings of that executor."""

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
    """A graph as it was written; `validate` checks whether it can run."""

    nodes: tuple[NodeSpec, ...] = ()
    edges: tuple[EdgeSpec, ...] = ()
    id: str = "graph"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a graph: a code for programs, a path into its JSON, a sentence for people."""

    code: str
    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"


def shown(value: object) -> str:
    """Return a short representation of any value for use in a sentence."""
    try:
        text = repr(value)
    except Exception:  # an int of 5,000 digits, a broken __repr__
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def thawed(value: Any) -> Any:
    """Return a mutable copy made of dicts and lists."""
    if type(value) is str:
        return value
    if isinstance(value, (dict, Mapping)):  # a dict is recognised immediately, a Mapping takes a subclass check
        return {key: thawed(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [thawed(one) for one in value]
    return value


class GraphInvalid(PenstockError):
    """A graph cannot be read or cannot run; `problems` lists why, up to MAX_PROBLEMS."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        shown = [f"[{problem.code}] {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
        if len(self.problems) > SHOWN_PROBLEMS:
            shown.append(f"and {len(self.problems) - SHOWN_PROBLEMS} more")
        super().__init__(f"the graph has {len(self.problems)} problem(s):\n  " + "\n  ".join(shown))
