"""What every `MemoryStore` must do.

Bounds are read from `penstock.nodes.memory` each time something is kept: the tests make some of them smaller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.errors import InvalidValue
from penstock.nodes import memory
from penstock.nodes.memory import Memory, space_of_run
from penstock.testing.contracts.stores.suite import (
    NOT_JSON,
    NOT_NAMES,
    ODD_NAMES,
    ODD_VALUES,
    StoreBundle,
    StoreContract,
    brought_to,
    fresh,
    raises,
)

KEYS = tuple(key for key in ODD_NAMES if len(key) <= memory.MAX_KEY)


@contextmanager
def bounded(most: int) -> Iterator[None]:
    """A space keeps no more than so many."""
    usual, memory.MAX_MEMORIES = memory.MAX_MEMORIES, most
    try:
        yield
    finally:
        memory.MAX_MEMORIES = usual


def nested(levels: int) -> Any:
    value: Any = "deep"
    for _ in range(levels):
        value = [value]
    return value


async def keys(stores: StoreBundle, text: str = "", space: str = "s", limit: int = 100) -> list[str]:
    return [one.key for one in await stores.memories.search(space, text, limit)]


class MemoryStoreContract(StoreContract):
    """Memories by space and key: replaced by their key, found by their words, the oldest forgotten."""

    @fresh
    async def test_what_is_remembered_is_there_in_its_space_and_in_no_other(self, stores: StoreBundle) -> None:
        await stores.memories.put("chat:1", "dam", {"m": 221})
        await stores.memories.put("chat:2", "dam", "another")
        assert await stores.memories.get("chat:1", "dam") == Memory("dam", {"m": 221})
        assert list(await stores.memories.search("chat:1", "dam")) == [Memory("dam", {"m": 221})]
        assert list(await stores.memories.search("chat:2", "")) == [Memory("dam", "another")]

    @fresh
    async def test_what_was_never_remembered_is_none(self, stores: StoreBundle) -> None:
        await stores.memories.put("s", "k", "word")
        for name in ("nobody", "", "x" * 1_001, *NOT_NAMES):
            assert await stores.memories.get("s", name) is None
            assert await stores.memories.get(name, "k") is None
            assert list(await stores.memories.search(name, "word")) == []
            assert list(await stores.memories.search(name, "")) == []

    @fresh
    async def test_memories_come_back_exactly_and_may_be_changed(self, stores: StoreBundle) -> None:
        values = [value for value in ODD_VALUES if len(repr(value)) < memory.MAX_VALUE_CHARACTERS]
        for number, value in enumerate(values):
            await stores.memories.put("s", f"k{number}", value)
        for number, value in enumerate(values):
            found = await stores.memories.get("s", f"k{number}")
            assert found is not None
            assert repr(found.value) == repr(value)
        given = {"a": [1]}
        await stores.memories.put("s", "k", given)
        given["a"].append(2)
        for found in (await stores.memories.get("s", "k"), *await stores.memories.search("s", "", 1)):
            assert found is not None
            assert found.value == {"a": [1]}, "what is kept is a copy"
            found.value["a"].append(3)
        assert await stores.memories.get("s", "k") == Memory("k", {"a": [1]})

    @fresh
    async def test_spaces_and_keys_are_told_apart_however_odd(self, stores: StoreBundle) -> None:
        for space in ODD_NAMES:
            for key in KEYS:
                await stores.memories.put(space, key, [space, key])
        for space in ODD_NAMES:
            assert await keys(stores, space=space) == [*reversed(KEYS)]
            for key in KEYS:
                assert await stores.memories.get(space, key) == Memory(key, [space, key])

    @fresh
    async def test_what_cannot_be_kept_is_refused_and_changes_nothing(self, stores: StoreBundle) -> None:
        await stores.memories.put("s", "k", "before")
        loop: list[Any] = []
        loop.append(loop)
        too_long = "x" * (memory.MAX_VALUE_CHARACTERS - 1)
        for value in (*NOT_JSON, loop, nested(101), too_long, [too_long]):
            with raises(InvalidValue):
                await stores.memories.put("s", "k", value)
        for key in ("", "x" * (memory.MAX_KEY + 1), *NOT_NAMES):
            with raises(InvalidValue):
                await stores.memories.put("s", key, 1)
        for space in ("x" * 1_001, *NOT_NAMES):
            with raises(InvalidValue):
                await stores.memories.put(space, "k", 1)
        for wrong in (-1, 1.5, "1", None, True):
            with raises(InvalidValue):
                await stores.memories.search("s", "", wrong)  # type: ignore[arg-type]
        assert list(await stores.memories.search("s", "")) == [Memory("k", "before")]

    @fresh
    async def test_as_much_as_may_be_kept_is_kept(self, stores: StoreBundle) -> None:
        key = "\U0001f30a" * memory.MAX_KEY
        for value in ("\u00fc" * (memory.MAX_VALUE_CHARACTERS - 2), nested(100)):
            await stores.memories.put("s", key, value)
            assert await stores.memories.get("s", key) == Memory(key, value)

    @fresh
    async def test_remembering_under_a_key_replaces_and_makes_it_the_newest(self, stores: StoreBundle) -> None:
        for key, value in (("a", "old water"), ("b", "water"), ("a", "new water")):
            await stores.memories.put("s", key, value)
        assert await keys(stores) == await keys(stores, "water") == ["a", "b"]
        assert await keys(stores, "old") == []
        assert await keys(stores, "new") == ["a"]
        for _ in range(2):
            await stores.memories.put("s", "a", "new water")
        assert list(await stores.memories.search("s", "")) == [Memory("a", "new water"), Memory("b", "water")]

    @fresh
    async def test_a_search_finds_what_shares_most_words_and_of_two_the_newer(self, stores: StoreBundle) -> None:
        said = {"1": "the dam is high", "2": "the river is wide", "3": "The Dam, the DAM!", "4": {"dam": ["high"]}}
        for key, value in said.items():
            await stores.memories.put("s", key, value)
        assert await keys(stores, "is the dam high?") == ["1", "4", "3", "2"]
        assert await keys(stores, "DAM dam Dam") == ["4", "3", "1"], "a word counts once"
        assert await keys(stores, "nothing of it") == await keys(stores, "da") == []
        assert await keys(stores, "", limit=2) == ["4", "3"]
        assert await keys(stores, "dam", limit=1) == ["4"]
        assert await keys(stores, "dam", limit=0) == await keys(stores, "", limit=0) == []

    @fresh
    async def test_a_memory_is_found_by_the_words_of_its_key_and_of_any_language(self, stores: StoreBundle) -> None:
        await stores.memories.put("s", "H\u00f6he der Staumauer", 221)
        await stores.memories.put("s", "\u30c0\u30e0", "\u043f\u043b\u043e\u0442\u0438\u043d\u0430 \ud800 a\x00b")
        assert await keys(stores, "H\u00d6HE") == await keys(stores, "221") == ["H\u00f6he der Staumauer"]
        for text in ("\u30c0\u30e0", "\u041f\u041b\u041e\u0422\u0418\u041d\u0410", "\ud800 a", "\x00b"):
            assert await keys(stores, text) == ["\u30c0\u30e0"]

    @fresh
    async def test_a_text_without_words_finds_the_newest(self, stores: StoreBundle) -> None:
        for key in "abc":
            await stores.memories.put("s", key, None)
        for text in ("", "  ", "?!", "\ud800\x00", "%"):
            assert await keys(stores, text, limit=2) == ["c", "b"]

    @fresh
    async def test_no_more_words_and_letters_are_looked_at_than_are_bounded(self, stores: StoreBundle) -> None:
        many = [f"w{number}" for number in range(memory.MAX_WORDS + 1)]
        long = "x" * memory.MAX_WORD
        await stores.memories.put("s", "many", " ".join(many))  # the key is a word too
        await stores.memories.put("s", "long", f"{long}yy")
        assert await keys(stores, many[-3]) == ["many"]
        assert await keys(stores, many[-2]) == []
        assert await keys(stores, f"{long}zz") == ["long"], "the rest is not looked at"
        assert await keys(stores, long[1:]) == []
        before = " ".join(many[: memory.MAX_WORDS_SOUGHT - 1])
        assert await keys(stores, f"{before} {long} {many[-1]}") == ["many", "long"]
        assert await keys(stores, f"{before} {many[-1]} {long}") == ["many"], "there were enough before it"

    @fresh
    async def test_the_oldest_of_a_full_space_is_forgotten(self, stores: StoreBundle) -> None:
        await stores.memories.put("t", "a", "word")
        with bounded(2):
            for key in ("a", "b", "a", "c"):
                await stores.memories.put("s", key, f"word {key}")
            assert await keys(stores) == await keys(stores, "word") == ["c", "a"]
            assert await stores.memories.get("s", "b") is None
            assert await keys(stores, "b") == []
            await stores.memories.put("s", "b", "word")
            assert await keys(stores) == ["b", "c"]
        for key in "de":
            await stores.memories.put("s", key, "word")
        assert await keys(stores) == ["e", "d", "b", "c"]
        with bounded(2):
            await stores.memories.put("s", "b", "word")
        assert await keys(stores) == ["b", "e"], "as many as are too many"
        assert await keys(stores, space="t") == ["a"]

    @fresh
    async def test_of_many_who_remember_at_once_none_is_lost_and_none_is_too_many(self, stores: StoreBundle) -> None:
        async with self.another(stores) as other:
            both = (stores, other)
            puts = [both[number % 2].memories.put("s", f"k{number}", "word") for number in range(self.claimants)]
            same = [both[number % 2].memories.put("t", "k", number) for number in range(self.claimants)]
            await asyncio.gather(*puts, *same)
            assert sorted(await keys(stores, "word")) == sorted(f"k{number}" for number in range(self.claimants))
            assert await keys(stores, space="t") == ["k"]
            with bounded(3):
                puts = [both[number % 2].memories.put("s", f"n{number}", "word") for number in range(self.claimants)]
                await asyncio.gather(*puts)
        newest = await keys(stores)
        assert len(newest) == 3
        assert all(key.startswith("n") for key in newest)
        assert await keys(stores, "word") == newest

    @fresh
    async def test_whoever_is_cancelled_while_it_is_remembered_finds_all_of_it_or_nothing(
        self, stores: StoreBundle
    ) -> None:
        asked = [asyncio.ensure_future(stores.memories.put("s", f"k{number}", "two words")) for number in range(8)]
        await asyncio.sleep(0)
        for one in asked[::2]:
            one.cancel()
        await asyncio.wait(asked)
        there = await keys(stores)
        assert {f"k{number}" for number in (1, 3, 5, 7)} <= set(there)
        assert await keys(stores, "two") == await keys(stores, "words") == there

    @fresh
    async def test_what_a_run_remembered_for_itself_goes_with_it(self, stores: StoreBundle) -> None:
        for id in ("old", "new"):
            await brought_to(stores, "completed", id)
        await brought_to(stores, "running", "r")
        spaces = [space_of_run("old"), space_of_run("new"), space_of_run("r"), "chat:old", "owner:old"]
        for space in spaces:
            await stores.memories.put(space, "k", "word")
        await stores.runs.remove_ended(2_001, limit=1)  # of two that ended together, the one whose id comes first
        assert [await keys(stores, "word", space) for space in spaces] == [["k"], [], ["k"], ["k"], ["k"]]
        await stores.memories.put(space_of_run("new"), "other", "word")
        assert await keys(stores, "", space_of_run("new")) == ["other"]
