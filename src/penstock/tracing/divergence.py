"""Detect runaway patterns of a run.

    repeated      the same call with the same arguments, many times among the latest calls
    alternating   two calls taking turns: A-B-A-B-…
    spend_rate    more money in the last minute than expected
    token_rate    more tokens in the last minute than expected

A detector observes calls and reports each pattern once. It reads no clock and stops nothing: the caller decides what a
pattern means.

Calls are compared by a key, which keeps no large or mutable argument alive: short plain values stand for themselves,
anything else is decomposed, up to a number of pieces, and hashed. An object is represented by its class and attributes;
one with neither attributes nor a hash of its own by its repr, at the cost of that repr. Of a long list, the length and
both ends are used, the end first, because that is where a growing conversation differs from one call to the next.
"""

from __future__ import annotations

import reprlib
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from threading import Lock
from typing import Any, Literal

from penstock import checks
from penstock.errors import InvalidValue
from penstock.money import Usd, format_usd, to_nanos

ShapeName = Literal["repeated", "alternating", "spend_rate", "token_rate"]
Key = tuple[str, str, Hashable]
"""Kind, name, and the arguments themselves or, if they are not short and plain, a hash of their parts."""

MINUTE_NS = 60_000_000_000
GRAIN_NS = 100_000_000
"""Spending within a tenth of a second is one entry: a minute has some 600 of them, whatever the number of calls."""
MAX_REPORTED = 1_000
"""Maximum number of remembered signatures; beyond that the oldest is dropped, and could be reported again."""

MAX_TEXT = 200
MAX_INT = 1 << 64
MAX_ARGS = 16
MAX_ENDS = 8
MAX_PIECES = 256
PLAIN = frozenset({bool, float, type(None)})


@dataclass(frozen=True, slots=True)
class Shape:
    """A runaway pattern: its kind, its subject, and a description."""

    shape: ShapeName
    signature: str
    message: str


NOTHING: Sequence[Shape] = ()


class DivergenceDetector:
    """Reports each runaway pattern once per signature; None disables a pattern. Safe to use from any thread."""

    def __init__(
        self,
        *,
        repeats: int | None = 5,
        alternations: int | None = 4,
        spend_usd_per_minute: Usd | None = None,
        tokens_per_minute: int | None = None,
        window: int = 32,
        halts: bool = False,
    ) -> None:
        self._window = checks.integer("window", window, minimum=2)
        self._repeats = None if repeats is None else checks.integer("repeats", repeats, minimum=2)
        if self._repeats is not None and self._repeats > self._window:
            raise InvalidValue("repeats", repeats, f"at most the {window} calls of the window")
        self._alternations = None if alternations is None else checks.integer("alternations", alternations, minimum=2)
        self._spend = _spend_rate(spend_usd_per_minute)
        self._tokens = _token_rate(tokens_per_minute)
        self.halts = checks.boolean("halts", halts)
        """Whether a call with such a pattern is to be stopped; the caller does that."""
        self._lock = Lock()
        self._recent: deque[Key] = deque()
        self._counts: dict[Key, int] = {}
        """Number of recent calls by key; never zero."""
        self._last: Key | None = None
        self._before_last: Key | None = None
        self._turns = 0
        """Number of calls, up to the last one, that took turns."""
        self._reported: OrderedDict[Hashable, None] = OrderedDict()

    def saw_call(self, kind: str, name: str, args: tuple[Any, ...]) -> Sequence[Shape]:
        """Record a call that is about to be made; return the patterns it completes."""
        key = _key(kind, name, args)
        with self._lock:
            repeated = self._completes_repetition(key)
            partner = self._completes_alternation(key)
        if not repeated and partner is None:
            return NOTHING
        # Showing arguments may run code of theirs: never under the lock.
        text, found = _shown(kind, name, args), []
        if repeated:
            message = f"{text} was called {self._repeats} times among the last {self._window} calls"
            found.append(Shape("repeated", text, message))
        if partner is not None:
            pair = f"{_shown(*partner)} and {text}"
            found.append(Shape("alternating", pair, f"{pair} have taken turns {self._alternations} times in a row"))
        return found

    def saw_spend(self, now_ns: int, cost_nanos: int, tokens: int) -> Sequence[Shape]:
        """Record the payment of a call; return the rates that have been exceeded."""
        if self._spend is None and self._tokens is None:
            return NOTHING
        found = []
        with self._lock:
            if self._spend is not None and self._spend.passed_by(now_ns, cost_nanos):
                found.append(self._spend.shape(format_usd))
            if self._tokens is not None and self._tokens.passed_by(now_ns, tokens):
                found.append(self._tokens.shape("{:,} tokens".format))
        return found or NOTHING

    # The callers of these hold the lock.

    def _completes_repetition(self, key: Key) -> bool:
        if self._repeats is None:
            return False
        recent, counts = self._recent, self._counts
        if len(recent) == self._window:
            oldest = recent.popleft()
            if left := counts.pop(oldest) - 1:  # most keys are there once, and are hashed each time
                counts[oldest] = left
        recent.append(key)
        counts[key] = count = counts.get(key, 0) + 1
        return count >= self._repeats and self._is_news(key)

    def _completes_alternation(self, key: Key) -> Key | None:
        """Return the call that this one has alternated with for long enough, unless that was reported."""
        if self._alternations is None:
            return None
        last = self._last
        if key == last:
            self._turns = 1
        elif key == self._before_last:
            self._turns += 1
        else:
            self._turns = 2
        self._before_last, self._last = last, key
        if self._turns >= 2 * self._alternations and self._is_news(frozenset((last, key))):
            return last
        return None

    def _is_news(self, signature: Hashable) -> bool:
        if signature in self._reported:
            return False
        self._reported[signature] = None
        if len(self._reported) > MAX_REPORTED:
            self._reported.popitem(last=False)
        return True


# Rates.


class _Rate:
    """A sum over the last minute, and whether it has exceeded its limit; not locked."""

    def __init__(self, shape: ShapeName, allowed: int) -> None:
        self._name: ShapeName = shape
        self._allowed = allowed
        self._entries: deque[tuple[int, int]] = deque()
        self._sum = 0
        self._is_reported = False

    def passed_by(self, now_ns: int, amount: int) -> bool:
        """Whether this amount is the first that exceeds the limit of the last minute."""
        if self._is_reported or not amount:
            return False
        entries = self._entries
        while entries and entries[0][0] <= now_ns - MINUTE_NS:
            self._sum -= entries.popleft()[1]
        self._sum += amount
        # Threads report in any order: who is late joins the newest entry.
        if entries and now_ns - entries[-1][0] < GRAIN_NS:
            entries[-1] = (entries[-1][0], entries[-1][1] + amount)
        else:
            entries.append((now_ns, amount))
        self._is_reported = self._sum > self._allowed
        return self._is_reported

    def shape(self, show: Callable[[int], str]) -> Shape:
        allowed = f"{show(self._allowed)} per minute"
        return Shape(self._name, allowed, f"{show(self._sum)} within a minute, more than {allowed}")


def _spend_rate(per_minute: Usd | None) -> _Rate | None:
    return None if per_minute is None else _Rate("spend_rate", to_nanos(per_minute, "spend_usd_per_minute"))


def _token_rate(per_minute: int | None) -> _Rate | None:
    return None if per_minute is None else _Rate("token_rate", checks.integer("tokens_per_minute", per_minute))


# Keys.


def _key(kind: str, name: str, args: tuple[Any, ...]) -> Key:
    return kind, name, args if _is_short_and_plain(args) else hash(repr([*_parts_of_all(args)]))


def _is_short_and_plain(args: tuple[Any, ...]) -> bool:
    if len(args) > MAX_ARGS:
        return False
    for arg in args:
        of = type(arg)
        if of is str:
            if len(arg) > MAX_TEXT:
                return False
        elif of is int:
            if not -MAX_INT < arg < MAX_INT:
                return False
        elif of not in PLAIN:
            return False
    return True


def _parts_of_all(args: tuple[Any, ...]) -> Iterator[list[object]]:
    yield [len(args)]
    for arg in _ends(args, MAX_ARGS):
        pieces: list[object] = []
        try:
            _take_apart(arg, pieces)
        except Exception:
            # Its hash or repr raised, another thread changed it while we looked, …: what we have must do.
            pieces.append(type(arg).__qualname__)
        yield pieces


def _take_apart(value: Any, pieces: list[object]) -> None:
    """Add the parts of `value` as short plain values. Each level adds at least one, so a cycle ends too."""
    of: Any = type(value)
    if len(pieces) >= MAX_PIECES:
        return
    if _is_short_and_plain((value,)):
        pieces.append(value)
    elif isinstance(value, (list, tuple, bytearray)):
        pieces.append((of.__qualname__, len(value)))
        for item in _ends(value, MAX_ENDS):
            _take_apart(item, pieces)
    elif isinstance(value, dict):
        pieces.append((of.__qualname__, len(value)))
        _take_apart_items(value, pieces)
    elif isinstance(value, (set, frozenset)):
        pieces.append((of.__qualname__, hash(frozenset(value))))
    elif of.__hash__ not in (None, object.__hash__):
        pieces.append((of.__qualname__, hash(value)))
    else:
        _take_apart_object(value, pieces)


def _take_apart_items(value: dict[Any, Any], pieces: list[object]) -> None:
    keys = list(islice(value, MAX_ENDS))
    if len(value) > MAX_ENDS:
        keys += islice(reversed(value), min(MAX_ENDS, len(value) - MAX_ENDS))
    for key in sorted(keys, key=repr):
        _take_apart(key, pieces)
        _take_apart(value[key], pieces)


def _take_apart_object(value: Any, pieces: list[object]) -> None:
    named = getattr(value, "__dataclass_fields__", None) or getattr(value, "__dict__", None)
    if named and not isinstance(value, type):
        pieces.append(type(value).__qualname__)
        for name in islice(named, 2 * MAX_ENDS):
            pieces.append(name)
            _take_apart(getattr(value, name, None), pieces)
    else:
        text = repr(value)
        pieces.append(text if len(text) <= MAX_TEXT else (len(text), hash(text)))


def _ends(items: Sequence[Any], count: int) -> Iterator[Any]:
    """Return all items, or the last `count` and the first `count` of them."""
    if len(items) <= 2 * count:
        return iter(items)
    return chain(items[-count:], items[:count])


# Words.

_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = 60
_shorten.maxlevel = 2
_shorten.maxlist = _shorten.maxtuple = _shorten.maxdict = _shorten.maxset = _shorten.maxfrozenset = 3
_shorten.fillvalue = "…"


def _shown(kind: str, name: str, args: Hashable) -> str:
    """Return `tool fetch('https://…')`, with `…` for arguments that are only known as a hash."""
    if not isinstance(args, tuple):
        return f"{kind} {name}(…)"
    shown = [_shown_argument(arg) for arg in args[:4]] + ["…"] * (len(args) > 4)
    return f"{kind} {name}({', '.join(shown)})"


def _shown_argument(arg: object) -> str:
    try:
        return _shorten.repr(arg)
    except Exception:
        return f"<{type(arg).__qualname__}>"
