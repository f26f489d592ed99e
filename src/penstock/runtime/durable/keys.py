"""Keys for places in a run; a place has the same key each time the run reaches it.

A resumed run takes the same path again and finds its earlier results under the key of each place. So a key must not
depend on timing: two branches, the tools of one turn and the items of a list have separate places, whichever of them
finishes first. A key is a path:

    draft                          a node of the graph
    draft/agent:draft/turn:2       the second turn of the agent in it
    …/turn:2/llm:gpt               the model's answer in that turn
    …/turn:2/llm:gpt?2             its answer to a repeated request, after a budget truncated the first answer
    …/turn:2/tool:0:call_7:9f2c…   the result of the first tool of that turn; the last part identifies the arguments
    each/3/write                   node `write` of the graph that a map runs on item 3
    draft~2/…                      the second attempt at a node
    draft~2/failed:2               the failure of this attempt, after which the node's policy continues

Inside a place, equal names are numbered: `llm:gpt`, `llm:gpt#2`. That is stable as long as a place works sequentially.
Code that makes concurrent calls itself gives each branch a place of its own with `scope`.

Knows paths and names; nothing of journals, calls or graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from hashlib import sha256
from urllib.parse import quote, unquote

from penstock import checks

PLAIN = " !$&'()*,;=@[]^_`{|}-."
"""Characters that are not escaped in a key, beside letters and digits; the separators of key parts are not among
them."""
MAX_PART = 200
"""Maximum length of a name in a key; a longer one is replaced by its beginning and a hash."""
MAX_KEY = 900
"""Maximum length of a key; a longer path is replaced by its first part and a hash. Stores accept keys of 1,000
bytes."""


class Scope:
    """A place in a run, with a count of how often each name was used in it."""

    __slots__ = ("_times", "path", "run", "run_id")

    def __init__(self, run: object, run_id: str, path: str = "") -> None:
        self.run = run
        """Identifies the run of the place; a run nested inside this one has its own."""
        self.run_id = run_id
        self.path = path
        self._times: dict[str, int] | None = None

    def node(self, node_id: str, attempt: int = 1) -> Scope:
        """Return the place of a node of the graph that runs here."""
        return Scope(self.run, self.run_id, self.node_path(node_id, attempt))

    def node_path(self, node_id: str, attempt: int = 1) -> str:
        """Return the key of that place."""
        segment = escaped(node_id)
        return self._path(segment if attempt == 1 else f"{segment}~{attempt}")

    def graph(self) -> Scope:
        """Return the place of the next graph that runs here; the nodes of the first graph are placed directly here."""
        times = self._count("graph")
        return Scope(self.run, self.run_id, self.path if times == 1 else self._path(f"#{times}"))

    def child(self, kind: str, *names: object) -> Scope:
        """Return the single place of that name."""
        return Scope(self.run, self.run_id, self._path(_marked(kind, names)))

    def next(self, kind: str, *names: object) -> Scope:
        """Return the next place of that name."""
        segment = _marked(kind, names)
        times = self._count(segment)
        return Scope(self.run, self.run_id, self._path(segment if times == 1 else f"{segment}#{times}"))

    def retry(self, times: int) -> Scope:
        """Return this place for a repeated call after an insufficient result; other places keep their numbers."""
        return Scope(self.run, self.run_id, f"{self.path}?{times}")

    def _path(self, segment: str) -> str:
        path = f"{self.path}/{segment}" if self.path else segment
        return path if len(path) <= MAX_KEY else _folded(path)

    def _count(self, segment: str) -> int:
        if self._times is None:
            self._times = {}
        self._times[segment] = times = self._times.get(segment, 0) + 1
        return times

    def __repr__(self) -> str:
        return f"<Scope {self.path!r} of run {self.run_id!r}>"


current_scope: ContextVar[Scope | None] = ContextVar("penstock_scope", default=None)
"""The place being executed; None outside of journalled runs."""


class enter_scope:
    """Context manager that executes its block at a place.

    Every model and tool call uses it, and a generator-based context manager takes three times as long.
    """

    __slots__ = ("_outside", "_place")

    def __init__(self, place: Scope) -> None:
        self._place = place

    def __enter__(self) -> Scope:
        self._outside = current_scope.set(self._place)
        return self._place

    def __exit__(self, *error: object) -> None:
        try:  # noqa: SIM105  in every call; `suppress` takes longer than all of this
            current_scope.reset(self._outside)
        except ValueError:
            pass  # closed from another context, where there is nothing to reset


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Give one of several concurrent branches a place of its own; does nothing without a journal.

    The names of the branches must differ, and be the same on every pass: `with scope(f"page {number}"): …`.
    """
    checks.text("name of a scope", name, minimum=1)
    around = current_scope.get()
    if around is None:
        yield
    else:
        with enter_scope(around.child("scope", name)):
            yield


def idempotency_key() -> str | None:
    """Return the key of the current work, which is the same when the work is repeated; None without a journal.

    Work in progress when its process died is repeated. Pass this key to external systems (a payment, a mail), so that
    they can distinguish a repetition from a second request.
    """
    place = current_scope.get()
    return None if place is None else f"{place.run_id}/{place.path}"


def entry_node(key: str) -> str | None:
    """Return the node of the outermost graph that an entry belongs to; None for an entry made outside of any graph."""
    first, _, others = key.partition("/")
    if first.startswith("#"):
        first = others.partition("/")[0]
    if not first or ":" in first or "#" in first:
        return None
    return unescaped(first.partition("~")[0])


def root_node_key(key: str) -> str:
    """Return the key of the entry's node in the outermost graph, as the node's own entry has it."""
    first, slash, others = key.partition("/")
    if first.startswith("#") and slash:
        return f"{first}/{others.partition('/')[0].partition('~')[0]}"
    return first.partition("~")[0]


def display_id(node_id: str) -> str:
    """Return the name `entry_node` gives a node: its id, unless that is very long."""
    return unescaped(escaped(node_id))


@lru_cache(maxsize=4_096)
def escaped(name: str) -> str:
    """Return a name escaped as one part of a key."""
    part = _quoted(name)
    return part if len(part) <= MAX_PART else f"{_quoted(name[:16])}+{_hash(name)}"


def _quoted(name: str) -> str:
    return quote(name, safe=PLAIN, errors="surrogatepass").replace("~", "%7E") or "%"


def unescaped(part: str) -> str:
    """Return the name that `escaped` made a part of a key from; a long one is shortened."""
    return "" if part == "%" else unquote(part, errors="surrogatepass")


def _marked(kind: str, names: tuple[object, ...]) -> str:
    return ":".join([kind, *(escaped(str(name)) for name in names)])


def _folded(path: str) -> str:
    """Shorten a path that is too long; its node and the fact that it is inside that node stay recognisable."""
    first, _, others = path.partition("/")
    if first.startswith("#"):
        first = f"{first}/{others.partition('/')[0]}"
    return f"{first}/+{_hash(path)}"


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
