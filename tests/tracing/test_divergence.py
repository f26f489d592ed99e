"""Runaway shapes are noticed, each once per signature, and what only looks alike is left alone."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, dataclass
from decimal import Decimal
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.tracing import divergence
from penstock.tracing.divergence import DivergenceDetector, Shape

pytestmark = pytest.mark.requirement("G-12")

SECOND_NS = 1_000_000_000


def names(shapes: Iterable[Shape]) -> list[str]:
    return [shape.shape for shape in shapes]


def calls(detector: DivergenceDetector, arguments: Iterable[Any], name: str = "fetch") -> list[Shape]:
    return [shape for argument in arguments for shape in detector.saw_call("tool", name, (argument,))]


def are_the_same(one: Any, other: Any) -> bool:
    return bool(calls(DivergenceDetector(repeats=2, alternations=None), [one, other]))


# Repetition.


def test_the_fifth_repetition_is_reported_and_no_other() -> None:
    detector = DivergenceDetector()
    reported = [names(calls(detector, ["https://a"])) for _ in range(40)]
    assert reported == [[]] * 4 + [["repeated"]] + [[]] * 35


def test_a_repetition_names_the_call_and_its_count() -> None:
    (shape,) = calls(DivergenceDetector(repeats=3), ["https://a"] * 3)
    assert shape == Shape(
        "repeated", "tool fetch('https://a')", "tool fetch('https://a') was called 3 times among the last 32 calls"
    )
    with pytest.raises(FrozenInstanceError):
        shape.shape = "alternating"  # type: ignore[misc]


def test_repeats_need_not_follow_each_other() -> None:
    detector = DivergenceDetector(repeats=3, window=7)
    assert names(calls(detector, ["a", "b", "c", "a", "d", "e", "a"])) == ["repeated"]


def test_calls_outside_the_window_do_not_count() -> None:
    detector = DivergenceDetector(repeats=3, window=6)
    assert calls(detector, ["a", "b", "c", "a", "d", "e", "a"]) == []


def test_each_call_that_repeats_is_reported() -> None:
    detector = DivergenceDetector(repeats=2, alternations=None)
    assert [shape.signature for shape in calls(detector, "abcabc")] == [f"tool fetch('{one}')" for one in "abc"]


@pytest.mark.parametrize(
    ("kind", "name", "args"), [("llm", "fetch", ("a",)), ("tool", "read", ("a",)), ("tool", "fetch", ("a", "b"))]
)
def test_kind_name_and_arguments_all_make_the_call(kind: str, name: str, args: tuple[Any, ...]) -> None:
    detector = DivergenceDetector(repeats=2)
    assert not detector.saw_call("tool", "fetch", ("a",))
    assert not detector.saw_call(kind, name, args)


@given(st.lists(st.sampled_from("abcd"), max_size=120), st.integers(2, 4), st.integers(4, 12))
def test_repetition_is_what_counting_the_window_says(history: list[str], repeats: int, window: int) -> None:
    detector = DivergenceDetector(repeats=repeats, alternations=None, window=window)
    expected = []
    for at, one in enumerate(history):
        recent = history[max(0, at + 1 - window) : at + 1]
        if recent.count(one) >= repeats and one not in expected:
            expected.append(one)
    assert [shape.signature for shape in calls(detector, history)] == [f"tool fetch('{one}')" for one in expected]


# Alternation.


def test_four_alternations_are_reported_once() -> None:
    detector = DivergenceDetector(repeats=None)
    reported = [names(calls(detector, [one])) for one in "ab" * 10]
    assert reported == [[]] * 7 + [["alternating"]] + [[]] * 12


def test_an_alternation_names_both_calls() -> None:
    (shape,) = calls(DivergenceDetector(repeats=None, alternations=2), "abab")
    assert shape.signature == "tool fetch('a') and tool fetch('b')"
    assert shape.message == "tool fetch('a') and tool fetch('b') have taken turns 2 times in a row"


@pytest.mark.parametrize(
    "history",
    ["aaaaaaaa", "abcabcabcabc", "aabbaabbaabb", "abaabaabaaba", "abacabacabac", "aba"],
)
def test_what_does_not_take_turns_is_no_alternation(history: str) -> None:
    assert calls(DivergenceDetector(repeats=None, alternations=2), history) == []


def test_the_same_pair_is_not_reported_again_in_the_other_order() -> None:
    detector = DivergenceDetector(repeats=None, alternations=2)
    assert names(calls(detector, "abab" + "x" + "baba" + "x" + "acac")) == ["alternating", "alternating"]


def test_a_call_does_not_take_turns_with_itself() -> None:
    assert names(calls(DivergenceDetector(repeats=None, alternations=2), "ababbbbb")) == ["alternating"]


def test_one_call_can_complete_both_shapes() -> None:
    assert names(calls(DivergenceDetector(repeats=2, alternations=2), "abab")) == [
        "repeated",
        "repeated",
        "alternating",
    ]


@given(st.lists(st.sampled_from("abc"), max_size=60), st.integers(2, 4))
def test_alternation_is_detected_at_the_end_of_the_history(history: list[str], alternations: int) -> None:
    detector = DivergenceDetector(repeats=None, alternations=alternations)
    reported: set[frozenset[str]] = set()
    for at, one in enumerate(history):
        end = history[max(0, at + 1 - 2 * alternations) : at + 1]
        pair = frozenset(end)
        takes_turns = len(end) == 2 * alternations and len(pair) == 2 and end == end[:2] * alternations
        assert bool(calls(detector, [one])) == (takes_turns and pair not in reported)
        if takes_turns:
            reported.add(pair)


# Which calls are the same.


@dataclass
class Query:
    text: str
    page: int = 0


@dataclass(slots=True)
class Slotted:
    text: Any


class Client:
    def __init__(self, host: Any) -> None:
        self.host = host


class Unshowable:
    __slots__ = ()

    def __repr__(self) -> str:
        raise ValueError("no")


class Unhashable(Unshowable):
    def __hash__(self) -> int:
        raise ValueError("no")


def conversation(length: int, last: str = "go on") -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"turn {at}"} for at in range(length - 1)] + [{"role": "user", "content": last}]


LOOP: list[Any] = []
LOOP.append(LOOP)

VAST: Any = "leaf"
for _ in range(20):
    VAST = [VAST] * 16


@pytest.mark.parametrize(
    "make",
    [
        lambda: "a",
        lambda: "x" * 100_000,
        lambda: 10**5_000,
        lambda: {"q": "x", "limit": [1, 2]},
        lambda: {1, 2, 3},
        lambda: Query("x"),
        lambda: Slotted("x"),
        lambda: Slotted(Client("h")),
        lambda: Client("h"),
        lambda: Client(Client("h")),
        lambda: Decimal("1.5"),
        lambda: b"x" * 1_000,
        lambda: deque([1, 2]),
        lambda: conversation(100),
        lambda: LOOP,
        lambda: VAST,
        lambda: Client,
        Unshowable,
        Unhashable,
    ],
)
def test_equal_arguments_make_the_same_call(make: Callable[[], Any]) -> None:
    assert are_the_same(make(), make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a", "b"),
        (-1, -2),
        ([-1], [-2]),
        (0, 2**61 - 1),
        ("x" * 1_000 + "a", "x" * 1_000 + "b"),
        ("x" * 500 + "a" + "x" * 500, "x" * 500 + "b" + "x" * 500),
        ([10**5_000], [10**5_000 + 1]),
        ({"q": "x"}, {"q": "y"}),
        ({"q": "x"}, {"p": "x"}),
        ({1, 2}, {1, 3}),
        ([1, [2]], [1, [3]]),
        ([1, 2], [[1], 2]),
        (Query("x", 1), Query("x", 2)),
        (Slotted("x"), Slotted("y")),
        (Client("h"), Client("i")),
        (Query("x"), Slotted("x")),
        (Client, Query),
        (type("Empty", (), {}), type("Blank", (), {})),
        (conversation, calls),
        (deque([1]), deque([2])),
        (deque(range(500)), deque([*range(499), 999])),
        ([1] * 100, [1] * 101),
        (conversation(100), conversation(101)),
        (conversation(100, "yes"), conversation(100, "no")),
        (list(range(1_000)), [-1, *range(1, 1_000)]),
    ],
)
def test_different_arguments_make_different_calls(one: Any, other: Any) -> None:
    assert not are_the_same(one, other)


def test_the_order_of_keys_does_not_matter() -> None:
    assert are_the_same({"a": 1, "b": 2}, {"b": 2, "a": 1})


def test_a_large_first_argument_does_not_hide_the_second() -> None:
    detector, big = DivergenceDetector(repeats=2), [[[at] * 8] * 8 for at in range(8)]
    assert not detector.saw_call("llm", "ask", (big, "small"))
    assert not detector.saw_call("llm", "ask", (big, "large"))


def test_an_agent_whose_conversation_grows_is_not_repeating_itself() -> None:
    detector = DivergenceDetector()
    assert calls(detector, (conversation(length) for length in range(1, 200))) == []


def test_a_short_lived_object_is_not_taken_for_the_one_before_it() -> None:
    assert calls(DivergenceDetector(), (Client(f"host-{at}") for at in range(100))) == []


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        ((), "tool f()"),
        (("a", 1, None), "tool f('a', 1, None)"),
        ((1, 2, 3, 4, 5), "tool f(1, 2, 3, 4, …)"),
        (({"q": [1, 2]},), "tool f({'q': [1, 2]})"),
        ((Unshowable(),), "tool f(<Unshowable instance at "),
        ((10**5_000,), "tool f(<int>)"),
    ],
)
def test_a_signature_is_short_text(args: tuple[Any, ...], shown: str) -> None:
    detector = DivergenceDetector(repeats=2)
    (shape,) = [*detector.saw_call("tool", "f", args), *detector.saw_call("tool", "f", args)]
    assert shape.signature.startswith(shown)


def test_a_long_argument_is_cut() -> None:
    (shape,) = calls(DivergenceDetector(repeats=2), ["https://" + "x" * 100_000] * 2)
    assert shape.signature.startswith("tool fetch('https://xxx")
    assert "…" in shape.signature
    assert len(shape.signature) < 100


# Rates.


def spends(detector: DivergenceDetector, *entries: tuple[float, int, int]) -> list[list[str]]:
    return [names(detector.saw_spend(round(at_s * SECOND_NS), cost, tokens)) for at_s, cost, tokens in entries]


def test_spending_faster_than_the_rate_is_reported_once() -> None:
    detector = DivergenceDetector(spend_usd_per_minute="0.10")
    reported = spends(detector, *((at, 30_000_000, 0) for at in range(10)))
    assert reported == [[], [], [], ["spend_rate"], [], [], [], [], [], []]


def test_the_rate_itself_may_be_reached() -> None:
    detector = DivergenceDetector(spend_usd_per_minute=0.1, tokens_per_minute=100)
    assert spends(detector, (0, 100_000_000, 100)) == [[]]
    assert spends(detector, (1, 1, 1)) == [["spend_rate", "token_rate"]]


def test_spending_older_than_a_minute_does_not_count() -> None:
    detector = DivergenceDetector(tokens_per_minute=100)
    assert spends(detector, (0, 0, 60), (30, 0, 40), (60, 0, 60), (89, 0, 1)) == [[], [], [], ["token_rate"]]


def test_a_rate_says_how_much_in_words() -> None:
    detector = DivergenceDetector(spend_usd_per_minute=1, tokens_per_minute=1_000)
    assert detector.saw_spend(0, 1_500_000_000, 1_200) == [
        Shape("spend_rate", "$1.00 per minute", "$1.50 within a minute, more than $1.00 per minute"),
        Shape(
            "token_rate", "1,000 tokens per minute", "1,200 tokens within a minute, more than 1,000 tokens per minute"
        ),
    ]


def test_zero_allows_nothing_and_none_allows_everything() -> None:
    assert spends(DivergenceDetector(tokens_per_minute=0), (0, 0, 0), (0, 0, 1)) == [[], ["token_rate"]]
    assert spends(DivergenceDetector(), (0, 10**18, 10**18)) == [[]]


def test_threads_may_report_in_any_order() -> None:
    detector = DivergenceDetector(tokens_per_minute=100)
    assert spends(detector, (10, 0, 50), (9.9, 0, 50), (10.1, 0, 1)) == [[], [], ["token_rate"]]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 50)), max_size=60))
def test_a_rate_is_what_adding_up_the_last_minute_says(steps: list[tuple[int, int]]) -> None:
    detector = DivergenceDetector(tokens_per_minute=100)
    at_s, spent, reported = 0, [], False
    for wait_s, tokens in steps:
        at_s += wait_s
        spent.append((at_s, tokens))
        passed = sum(amount for when, amount in spent if when > at_s - 60) > 100
        assert spends(detector, (at_s, 0, tokens)) == [["token_rate"] if passed and not reported else []]
        reported = reported or passed


# Bounds.


def test_nothing_found_is_always_the_same_empty_tuple() -> None:
    detector = DivergenceDetector(tokens_per_minute=10)
    assert detector.saw_call("tool", "f", ("a",)) is detector.saw_spend(0, 1, 1) is divergence.NOTHING == ()
    assert DivergenceDetector().saw_spend(0, 1, 1) is divergence.NOTHING


def test_arguments_are_not_kept_alive() -> None:
    detector, client = DivergenceDetector(), Client("h")
    watched = weakref.ref(client)
    for _ in range(5):
        detector.saw_call("tool", "f", (client, [client]))
    del client
    gc.collect()
    assert watched() is None


def test_a_long_text_is_not_kept() -> None:
    detector, text = DivergenceDetector(), "x" * 1_000_000
    before = sys.getrefcount(text)
    for _ in range(5):
        detector.saw_call("tool", "f", (text,))
    assert sys.getrefcount(text) == before


def test_the_number_of_remembered_signatures_is_bounded_and_the_oldest_is_dropped() -> None:
    detector = DivergenceDetector(repeats=2, alternations=None)
    assert len(calls(detector, (at // 2 for at in range(2 * divergence.MAX_REPORTED)))) == divergence.MAX_REPORTED
    assert calls(detector, [0, 0]) == []
    assert names(calls(detector, ["one more"] * 2)) == ["repeated"]
    assert names(calls(detector, [0, 0])) == ["repeated"]
    assert len(detector._reported) == divergence.MAX_REPORTED


def test_a_minute_of_any_number_of_calls_takes_bounded_memory() -> None:
    detector = DivergenceDetector(tokens_per_minute=10**9)
    for at in range(20_000):
        detector.saw_spend(at * 6_000_000, 0, 1)
    assert detector._tokens is not None
    assert len(detector._tokens._entries) <= 601


@contextmanager
def switching_at_every_step() -> Iterator[None]:
    """Threads started inside give way at each step of the detector: races that are possible do happen."""

    def at_step(frame: FrameType, event: str, arg: Any) -> Any:
        time.sleep(0)
        return at_step

    def at_call(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes = frame.f_code.co_filename == divergence.__file__
        return at_step if frame.f_trace_opcodes else None

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threading.settrace(at_call)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        threading.settrace(None)


def in_eight_threads(work: Callable[[], None]) -> None:
    start = threading.Barrier(8)

    def begin_together() -> None:
        start.wait()
        work()

    with switching_at_every_step():
        threads = [threading.Thread(target=begin_together) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_eight_threads_get_each_signature_once() -> None:
    detector = DivergenceDetector(repeats=8, alternations=None, window=8 * 12)
    reported: list[str] = []

    def work() -> None:
        for at in range(12):
            reported.extend(shape.signature for shape in detector.saw_call("tool", "f", (at,)))

    in_eight_threads(work)
    assert sorted(reported) == sorted(f"tool f({at})" for at in range(12))


def test_nothing_that_eight_threads_spend_is_lost() -> None:
    detector = DivergenceDetector(tokens_per_minute=8 * 25 - 1)
    reported: list[str] = []

    def work() -> None:
        for _ in range(25):
            reported.extend(names(detector.saw_spend(0, 0, 1)))

    in_eight_threads(work)
    assert reported == ["token_rate"]


def test_showing_an_argument_may_use_the_detector_again() -> None:
    detector = DivergenceDetector(repeats=2)

    class Curious:
        __slots__ = ()

        def __repr__(self) -> str:
            detector.saw_call("tool", "show", ())
            return "Curious()"

    assert names(calls(detector, [Curious(), Curious()])) == ["repeated"]


# Arguments.


def test_a_shape_that_is_switched_off_is_not_reported() -> None:
    assert calls(DivergenceDetector(repeats=None, alternations=None), "ab" * 50 + "a" * 50) == []


def test_halting_is_opt_in() -> None:
    assert DivergenceDetector().halts is False
    assert DivergenceDetector(halts=True).halts is True


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repeats", 1),
        ("repeats", 0),
        ("repeats", True),
        ("repeats", 2.5),
        ("repeats", 33),
        ("alternations", 1),
        ("alternations", "4"),
        ("spend_usd_per_minute", -1),
        ("spend_usd_per_minute", float("nan")),
        ("spend_usd_per_minute", "much"),
        ("tokens_per_minute", -1),
        ("tokens_per_minute", 1.5),
        ("tokens_per_minute", True),
        ("window", 1),
        ("window", None),
        ("halts", None),
    ],
)
def test_an_unusable_argument_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as refused:
        DivergenceDetector(**{field: value})
    assert refused.value.field == field
