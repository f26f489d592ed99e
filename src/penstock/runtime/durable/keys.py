"""Where in a run something happens, as a key that is the same each time the run comes to it.

A run that is resumed goes the same way again, and finds what it did before under the key of the place. So a key may not
depend on what happened to come first: two branches, the tools of one turn, the items of a list have their places side
by side, whichever of them is quicker. A key is a path:

    draft                          a node of the graph
    draft/agent:draft/turn:2       the second turn of the agent in it
    …/turn:2/llm:gpt               what the model answered in that turn
    …/turn:2/llm:gpt?2             what it answered when it was asked again, for a budget had cut the first answer
    …/turn:2/tool:0:call_7:9f2c…   what the first tool of that turn gave; the last part is what it was asked for
    each/3/write                   node `write` of the graph that a map runs on item 3
    draft~2/…                      the second attempt at a node

Inside a place, what has the same name is counted: `llm:gpt`, `llm:gpt#2`. That is stable as long as one place does one
thing after the other. Code that makes calls side by side by itself gives each branch a place of its own with `scope`.

Knows paths and names; nothing of journals, calls or graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from hashlib import sha256
from urllib.parse import quote, unquote

from penstock.runtime.options import must_be_name

PLAIN = " !$&'()*,;=@[]^_`{|}-."
"""What stands in a key as it is, beside letters and digits; the marks between the parts of a key are not among it."""
MAX_PART = 200
"""A longer name stands in a key by its beginning and a hash."""
MAX_KEY = 900
"""A longer path stands in a key by its first part and a hash: stores take keys of a thousand bytes."""


class Scope:
    """A place in a run, and how often each name was used in it."""

    __slots__ = ("_times", "path", "run", "run_id")

    def __init__(self, run: object, run_id: str, path: str = "") -> None:
        self.run = run
        """Whose place it is: that of another run inside this one is not."""
        self.run_id = run_id
        self.path = path
        self._times: dict[str, int] | None = None

    def node(self, node_id: str, attempt: int = 1) -> Scope:
        """The place of a node of the graph that runs here."""
        return Scope(self.run, self.run_id, self.node_path(node_id, attempt))

    def node_path(self, node_id: str, attempt: int = 1) -> str:
        """The key of that place."""
        segment = escaped(node_id)
        return self._path(segment if attempt == 1 else f"{segment}~{attempt}")

    def graph(self) -> Scope:
        """The place of the next graph that runs here; the first one's nodes stand here themselves."""
        times = self._count("graph")
        return Scope(self.run, self.run_id, self.path if times == 1 else self._path(f"#{times}"))

    def mark(self, kind: str, *names: object) -> Scope:
        """A place of that name; there is one."""
        return Scope(self.run, self.run_id, self._path(_marked(kind, names)))

    def next(self, kind: str, *names: object) -> Scope:
        """The next place of that name."""
        segment = _marked(kind, names)
        times = self._count(segment)
        return Scope(self.run, self.run_id, self._path(segment if times == 1 else f"{segment}#{times}"))

    def again(self, times: int) -> Scope:
        """This place, come to for that time because what was found there is not enough; others keep their numbers."""
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


here: ContextVar[Scope | None] = ContextVar("penstock_scope", default=None)
"""The place where this is being executed; None outside of journalled runs."""


class Entered:
    """What is done in the block is done at that place.

    Every model and tool call comes by here, and a generator as a context manager takes three times as long.
    """

    __slots__ = ("_outside", "_place")

    def __init__(self, place: Scope) -> None:
        self._place = place

    def __enter__(self) -> Scope:
        self._outside = here.set(self._place)
        return self._place

    def __exit__(self, *error: object) -> None:
        try:  # noqa: SIM105  in every call; `suppress` takes longer than all of this
            here.reset(self._outside)
        except ValueError:
            pass  # closed from elsewhere, where there is nothing to reset


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Give one of several branches that run side by side a place of its own; does nothing without a journal.

    The names of the branches differ, and are the same on every pass: `with scope(f"page {number}"): …`.
    """
    must_be_name("name of a scope", name)
    around = here.get()
    if around is None:
        yield
    else:
        with Entered(around.mark("scope", name)):
            yield


def idempotency_key() -> str | None:
    """The key of the work that is being done here, the same when it is done again; None without a journal.

    Work that was under way when its process died is done again. Whoever has effects outside (a payment, a mail) hands
    this on, so that the second time can be told from a second one.
    """
    place = here.get()
    return None if place is None else f"{place.run_id}/{place.path}"


def entry_node(key: str) -> str | None:
    """The node of the outermost graph that an entry belongs to; None for one that was made outside of any graph."""
    first, _, others = key.partition("/")
    if first.startswith("#"):
        first = others.partition("/")[0]
    if not first or ":" in first or "#" in first:
        return None
    return _unescaped(first.partition("~")[0])


def outermost(key: str) -> str:
    """The key of the node of the outermost graph that an entry belongs to, as its own entry has it."""
    first, slash, others = key.partition("/")
    if first.startswith("#") and slash:
        return f"{first}/{others.partition('/')[0].partition('~')[0]}"
    return first.partition("~")[0]


def known_as(node_id: str) -> str:
    """What `entry_node` calls a node: its id, unless that is very long."""
    return _unescaped(escaped(node_id))


@lru_cache(maxsize=4_096)
def escaped(name: str) -> str:
    """A name as one part of a key."""
    part = _quoted(name)
    return part if len(part) <= MAX_PART else f"{_quoted(name[:16])}+{_hash(name)}"


def _quoted(name: str) -> str:
    return quote(name, safe=PLAIN, errors="surrogatepass").replace("~", "%7E") or "%"


def _unescaped(part: str) -> str:
    return "" if part == "%" else unquote(part, errors="surrogatepass")


def _marked(kind: str, names: tuple[object, ...]) -> str:
    return ":".join([kind, *(escaped(str(name)) for name in names)])


def _folded(path: str) -> str:
    """A path that is too long: whose node it belongs to can still be told, and what is inside of it."""
    first, _, others = path.partition("/")
    if first.startswith("#"):
        first = f"{first}/{others.partition('/')[0]}"
    return f"{first}/+{_hash(path)}"


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
