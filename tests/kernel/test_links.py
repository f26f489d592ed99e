"""An artifact is made once for all that need it, and only what really needs itself is a circle."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.kernel.links import Key, LinkCycle, LinkTable, Made


def key(node: str, handle: str = "output") -> Key:
    return node, handle


A, B, C, D = map(key, "abcd")


def test_the_first_makes_it_the_second_waits_and_both_get_the_same() -> None:
    table = LinkTable()
    artifact = object()
    assert table.ask(A, None) == "make"
    assert table.ask(A, None) == "wait"
    table.done(A, artifact)
    assert table.ask(A, None) == Made(artifact)


def test_none_is_a_value_and_is_made_once() -> None:
    table = LinkTable()
    table.ask(A, None)
    table.done(A, None)
    assert table.ask(A, None) == Made(None)


def test_two_handles_of_a_node_are_two_artifacts() -> None:
    table = LinkTable()
    assert table.ask(key("a", "x"), None) == "make"
    assert table.ask(key("a", "y"), None) == "make"


def test_what_failed_is_made_again_by_who_asks_next() -> None:
    table = LinkTable()
    table.ask(A, None)
    table.failed(A)
    assert table.ask(A, None) == "make"


def test_two_consumers_at_once_are_no_circle() -> None:
    table = LinkTable()
    table.ask(A, None)
    table.ask(B, None)
    assert table.ask(C, A) == "make"
    assert table.ask(C, B) == "wait"
    table.done(C, "shared")
    assert table.ask(C, A) == table.ask(C, B) == Made("shared")


def test_a_diamond_of_artifacts_is_no_circle() -> None:
    table = LinkTable()
    table.ask(A, None)
    assert [table.ask(B, A), table.ask(C, A)] == ["make", "make"]
    assert [table.ask(D, B), table.ask(D, C)] == ["make", "wait"]


def test_an_artifact_that_needs_itself_is_a_circle() -> None:
    table = LinkTable()
    table.ask(A, None)
    with pytest.raises(LinkCycle) as caught:
        table.ask(A, A)
    assert caught.value.path == ("a.output", "a.output")


def test_a_circle_names_its_path() -> None:
    table = LinkTable()
    table.ask(A, None)
    table.ask(B, A)
    table.ask(C, B)
    with pytest.raises(LinkCycle, match=r"c\.output → a\.output → b\.output → c\.output") as caught:
        table.ask(A, C)
    assert caught.value.path == ("c.output", "a.output", "b.output", "c.output")


def test_a_circle_that_two_makers_close_together_is_found_by_the_second() -> None:
    table = LinkTable()
    table.ask(A, None)
    table.ask(B, None)
    assert table.ask(B, A) == "wait"
    with pytest.raises(LinkCycle, match=r"b\.output → a\.output → b\.output"):
        table.ask(A, B)


def test_a_refused_circle_leaves_the_table_as_it_was() -> None:
    table = LinkTable()
    table.ask(A, None)
    table.ask(B, A)
    with pytest.raises(LinkCycle):
        table.ask(A, B)
    table.done(B, "without a")
    assert table.ask(B, A) == Made("without a")
    table.done(A, "with b")


def test_a_wait_that_failed_is_not_half_of_a_later_circle() -> None:
    table = LinkTable()
    table.ask(A, None)
    table.ask(B, A)
    table.failed(B)
    assert table.ask(B, None) == "make", "a does without b; another node wants it now"
    assert table.ask(A, B) == "wait", "and b may need a"


def test_the_waits_of_a_failed_artifact_no_longer_count() -> None:
    table = LinkTable()
    table.ask(A, None)
    table.ask(B, A)
    table.failed(A)
    assert table.ask(A, B) == "make"


@pytest.mark.parametrize("end", ["done", "failed"])
def test_only_an_artifact_that_is_being_made_can_end(end: str) -> None:
    table = LinkTable()
    table.ask(A, None)
    table.done(A, 1)
    with pytest.raises(InvalidValue, match="being made"):
        table.failed(A) if end == "failed" else table.done(A, 2)
    assert table.ask(A, None) == Made(1)


def test_a_long_line_of_artifacts_is_followed_without_recursion() -> None:
    table = LinkTable()
    line = [key(f"n{at}") for at in range(20_000)]
    table.ask(line[0], None)
    for consumer, needed in pairwise(line):
        table.ask(needed, consumer)
    with pytest.raises(LinkCycle) as caught:
        table.ask(line[0], line[-1])
    assert len(caught.value.path) == 20_001


class Maker:
    """One artifact in the making: it asks for what it needs, one after the other, and waits where the table says so."""

    def __init__(self, key: Key, needs: list[Key]) -> None:
        self.key, self.left = key, list(needs)
        self.waiting = False


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=10),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.data(),
)
def test_in_every_interleaving_each_is_made_once_or_a_true_circle_is_named(
    pairs: list[tuple[int, int]], wanted: list[int], data: st.DataObject
) -> None:
    keys = [key(f"n{at}") for at in range(6)]
    needs = {one: list(dict.fromkeys(keys[b] for a, b in pairs if keys[a] == one)) for one in keys}
    table, made = LinkTable(), list[Key]()
    makers = [Maker(keys[at], needs[keys[at]]) for at in wanted if table.ask(keys[at], None) == "make"]
    circle = None
    while makers and circle is None:
        assert not all(maker.waiting for maker in makers), "everyone waits and no circle was named"
        maker = data.draw(st.sampled_from([maker for maker in makers if not maker.waiting]))
        if not maker.left:
            table.done(maker.key, maker.key)
            made.append(maker.key)
            makers.remove(maker)
            for other in makers:
                other.waiting = other.waiting and bool(other.left) and other.left[0] != maker.key
            continue
        try:
            answer = table.ask(maker.left[0], maker.key)
        except LinkCycle as error:
            circle = error.path
            break
        if isinstance(answer, Made):
            assert answer.artifact == maker.left.pop(0)
        else:
            maker.waiting = True
            if answer == "make":
                makers.append(Maker(maker.left[0], needs[maker.left[0]]))
    assert len(made) == len(set(made))
    if circle is None:
        assert set(made) == reached(set(map(keys.__getitem__, wanted)), needs)
    else:
        steps = {(f"{a[0]}.{a[1]}", f"{b[0]}.{b[1]}") for a, all_needed in needs.items() for b in all_needed}
        assert circle[0] == circle[-1]
        assert set(pairwise(circle)) <= steps


def reached(start: set[Key], needs: dict[Key, list[Key]]) -> set[Key]:
    found = set(start)
    while more := {needed for one in found for needed in needs[one]} - found:
        found |= more
    return found
