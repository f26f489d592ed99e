"""The contract of every `MemoryStore`.

Bounds are read from `penstock.nodes.memory` each time a memory is stored: the tests make some of them smaller.
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
    """Limit the number of memories in a space."""
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
    return [memory.key for memory in await stores.memories.search(space, text, limit)]


class MemoryStoreContract(StoreContract):
    """Memories by space and key: replaced by their key, found by their words, the oldest removed."""

    @fresh
    async def test_a_memory_is_found_in_its_space_only(self, stores: StoreBundle) -> None:
        await stores.memories.put("chat:1", "dam", {"m": 221})
        await stores.memories.put("chat:2", "dam", "another")
        assert await stores.memories.get("chat:1", "dam") == Memory("dam", {"m": 221})
        assert list(await stores.memories.search("chat:1", "dam")) == [Memory("dam", {"m": 221})]
        assert list(await stores.memories.search("chat:2", "")) == [Memory("dam", "another")]

    @fresh
    async def test_an_unknown_memory_is_none(self, stores: StoreBundle) -> None:
        await stores.memories.put("s", "k", "word")
        for name in ("unknown", "", "x" * 1_001, *NOT_NAMES):
            assert await stores.memories.get("s", name) is None
            assert await stores.memories.get(name, "k") is None
            assert list(await stores.memories.search(name, "word")) == []
            assert list(await stores.memories.search(name, "")) == []

    @fresh
    async def test_memories_are_read_back_exactly_and_are_copies(self, stores: StoreBundle) -> None:
        values = [value for value in ODD_VALUES if len(repr(value)) < memory.MAX_VALUE_CHARACTERS]
        for number, value in enumerate(values):
            await stores.memories.put("s", f"k{number}", value)
        for number, value in enumerate(values):
            found = await stores.memories.get("s", f"k{number}")
            assert found is not None
            assert repr(found.value) == repr(value)
        original = {"a": [1]}
        await stores.memories.put("s", "k", original)
        original["a"].append(2)
        for found in (await stores.memories.get("s", "k"), *await stores.memories.search("s", "", 1)):
            assert found is not None
            assert found.value == {"a": [1]}, "a copy is stored"
            found.value["a"].append(3)
        assert await stores.memories.get("s", "k") == Memory("k", {"a": [1]})

    @fresh
    async def test_odd_spaces_and_keys_are_distinct(self, stores: StoreBundle) -> None:
        for space in ODD_NAMES:
            for key in KEYS:
                await stores.memories.put(space, key, [space, key])
        for space in ODD_NAMES:
            assert await keys(stores, space=space) == [*reversed(KEYS)]
            for key in KEYS:
                assert await stores.memories.get(space, key) == Memory(key, [space, key])

    @fresh
    async def test_a_memory_that_cannot_be_stored_is_refused_and_changes_nothing(self, stores: StoreBundle) -> None:
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
    async def test_a_memory_of_the_maximum_size_is_stored(self, stores: StoreBundle) -> None:
        key = "\U0001f30a" * memory.MAX_KEY
        for value in ("\u00fc" * (memory.MAX_VALUE_CHARACTERS - 2), nested(100)):
            await stores.memories.put("s", key, value)
            assert await stores.memories.get("s", key) == Memory(key, value)

    @fresh
    async def test_putting_a_key_again_replaces_it_and_makes_it_the_newest(self, stores: StoreBundle) -> None:
        for key, value in (("a", "old water"), ("b", "water"), ("a", "new water")):
            await stores.memories.put("s", key, value)
        assert await keys(stores) == await keys(stores, "water") == ["a", "b"]
        assert await keys(stores, "old") == []
        assert await keys(stores, "new") == ["a"]
        for _ in range(2):
            await stores.memories.put("s", "a", "new water")
        assert list(await stores.memories.search("s", "")) == [Memory("a", "new water"), Memory("b", "water")]

    @fresh
    async def test_a_search_ranks_by_shared_words_then_by_age(self, stores: StoreBundle) -> None:
        values = {"1": "the dam is high", "2": "the river is wide", "3": "The Dam, the DAM!", "4": {"dam": ["high"]}}
        for key, value in values.items():
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
    async def test_a_search_without_words_finds_the_newest(self, stores: StoreBundle) -> None:
        for key in "abc":
            await stores.memories.put("s", key, None)
        for text in ("", "  ", "?!", "\ud800\x00", "%"):
            assert await keys(stores, text, limit=2) == ["c", "b"]

    @fresh
    async def test_the_number_and_length_of_words_are_limited(self, stores: StoreBundle) -> None:
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
    async def test_the_oldest_memory_of_a_full_space_is_removed(self, stores: StoreBundle) -> None:
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
    async def test_concurrent_puts_lose_nothing_and_respect_the_maximum(self, stores: StoreBundle) -> None:
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
    async def test_a_cancelled_put_is_stored_whole_or_not_at_all(self, stores: StoreBundle) -> None:
        puts = [asyncio.ensure_future(stores.memories.put("s", f"k{number}", "two words")) for number in range(8)]
        await asyncio.sleep(0)
        for put in puts[::2]:
            put.cancel()
        await asyncio.wait(puts)
        there = await keys(stores)
        assert {f"k{number}" for number in (1, 3, 5, 7)} <= set(there)
        assert await keys(stores, "two") == await keys(stores, "words") == there

    @fresh
    async def test_the_private_memories_of_a_run_are_removed_with_it(self, stores: StoreBundle) -> None:
        for id in ("old", "new"):
            await brought_to(stores, "completed", id)
        await brought_to(stores, "running", "r")
        spaces = [space_of_run("old"), space_of_run("new"), space_of_run("r"), "chat:old", "owner:old"]
        for space in spaces:
            await stores.memories.put(space, "k", "word")
        await stores.runs.remove_ended(2_001, limit=1)  # of two that ended together, the run whose id comes first
        assert [await keys(stores, "word", space) for space in spaces] == [["k"], [], ["k"], ["k"], ["k"]]
        await stores.memories.put(space_of_run("new"), "other", "word")
        assert await keys(stores, "", space_of_run("new")) == ["other"]
