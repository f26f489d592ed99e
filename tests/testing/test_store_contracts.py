"""The suites of the service's stores find what is wrong with a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from penstock.nodes import memory
from penstock.storage.memory import MemoryStores, approvals, bells, chats, events, graphs, memories, runs
from penstock.storage.memory.shapes import Shape
from penstock.testing import sim_run
from penstock.testing.contracts.stores import StoresContract, agree


class Suite(StoresContract):
    async def open_stores(self) -> MemoryStores:
        return MemoryStores()


def nothing(*args: Any, **kwargs: Any) -> None: ...


def always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


async def first_only(self: Any, worker: str, run_ids: Any, **times: int) -> Any:
    return set(run_ids)


BROKEN: list[tuple[object, str, Any, str]] = [
    (runs, "_is_free", lambda run, now_ms: run.status == "queued", "a_run_is_taken_over_once_its_lease_has_run_out"),
    (runs, "_is_free", lambda run, now_ms: run.status not in runs.ENDED, "of_many_who_take_over_one_gets_it"),
    (runs, "_is_free", always(True), "only_what_is_queued_or_was_left_can_be_claimed"),
    (runs, "_age", lambda run: (0, run.id), "runs_are_listed_newest_first"),
    (runs, "_age", lambda run: run.created_ms, "pages_follow_each_other"),
    (runs, "_check_way", nothing, "a_claimed_run_goes_where_the_table_says"),
    (runs, "_check_way", nothing, "a_run_that_nobody_has_claimed_is_ended_where"),
    (runs, "_check_way", nothing, "a_run_goes_on_from_where_the_table_says"),
    (runs, "ASKED", (), "an_id_that_is_taken_by_another_run_is_a_conflict"),
    (runs, "GIVEN_BACK", {}, "the_worker_changes_what_it_has_claimed"),
    (runs, "CLEARED", {}, "a_run_that_goes_on_has_not_ended"),
    (runs, "CHANGEABLE", tuple(runs.RunRecord._fields), "what_a_worker_may_not_change_is_refused"),
    (runs.MemoryRunStore, "fence", nothing, "whoever_does_not_have_the_run_tells_nothing"),
    (runs.MemoryRunStore, "fence", nothing, "whoever_does_not_have_the_run_records_nothing"),
    (runs.MemoryRunStore, "renew", first_only, "a_lease_is_renewed_for_whoever_has_it"),
    (runs.MemoryRunStore, "on_forget", nothing, "a_run_that_ended_long_ago_is_forgotten_with_all_it_left"),
    (runs.MemoryRunStore, "_as_asked", lambda self, run, after, why: run, "a_run_that_nobody_has_claimed_is_not"),
    (events, "_check_known", always(0), "what_is_there_already_is_skipped"),
    (events, "_check_known", always(0), "a_gap_is_a_conflict_and_nothing_is_kept"),
    (events, "_check_known", lambda id, told, new: len(told), "another_event_in_the_place_of_one_is_a_conflict"),
    (events, "ENTRY", Shape(events.JournalEntry, documents=("value",)), "all_or_none_are_written"),
    (bells.Bells, "until", lambda self, key, is_so, timeout_s: _at_once(is_so), "waiting_ends_with_the_next_event"),
    (graphs, "_check_expected", nothing, "a_version_that_is_not_the_expected_one_is_a_conflict"),
    (graphs, "_digest", always("0" * 64), "every_change_is_a_version"),
    (approvals, "ANSWERS", approvals.STATES, "what_no_database_could_keep_is_neither_asked_nor_answered"),
    (approvals.MemoryApprovalStore, "_put_before", always(None), "a_question_is_put_once_by_its_run_and_key"),
    (approvals.MemoryApprovalStore, "_forget", nothing, "a_run_that_ended_long_ago_is_forgotten_with_all_it_left"),
    (chats, "new_messages", lambda known, new: new, "messages_are_added_all_or_none"),
    (chats, "_is_same", always(True), "a_message_that_is_there_is_skipped_if_it_is_the_same"),
    (chats, "_is_same", always(False), "an_answer_that_was_being_written_is_finished_once"),
    (chats._Chat, "bring_into_view", nothing, "whatever_is_added_or_chosen_is_in_view_as_in_a_tree"),
    (chats, "_use", lambda chat: (0, chat.id), "chats_are_listed_the_one_used_last_first"),
    (chats, "_is_same", always(False), "a_chat_is_the_same_whichever_call_fails"),
    (memories, "_forget_oldest", nothing, "the_oldest_of_a_full_space_is_forgotten"),
    (
        memories,
        "to_keep",
        lambda space, key, value: memories.Kept("1", frozenset({"word"})),
        "what_is_remembered_is_there_in_its",
    ),
    (memories.InProcessMemory, "_forget", nothing, "what_a_run_remembered_for_itself_goes_with_it"),
    (memory, "words_sought", lambda text: text.split(), "a_search_finds_what_shares_most_words"),
    (memory, "words_of", lambda key, value: {"word"}, "a_memory_is_found_by_the_words_of_its_key"),
    (graphs.MemoryGraphStore, "_given", lambda self, graph: graph, "a_graph_comes_back_as_it_was_saved"),
]
"""What is broken, how, and the beginning of the sentence that says so."""


async def _at_once(is_so: Callable[[], bool]) -> bool:
    return is_so()


def sentences() -> list[str]:
    return [name for name in dir(Suite) if name.startswith("test_")]


@pytest.mark.parametrize(("where", "what", "broken", "sentence"), BROKEN)
def test_a_broken_store_is_found(
    where: object, what: str, broken: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = [name for name in sentences() if name.startswith(f"test_{sentence}")]
    sim_run(getattr(Suite(), name), seed=1)
    monkeypatch.setattr(where, what, broken)
    with pytest.raises(Exception):  # an assertion, or what the store makes of it
        sim_run(getattr(Suite(), name), seed=1)


def test_no_two_suites_have_a_sentence_in_common() -> None:
    suites = [suite for suite in StoresContract.__mro__ if suite is not StoresContract]
    told = Counter(name for suite in suites for name in vars(suite) if name.startswith("test_"))
    assert [name for name, count in told.items() if count > 1] == [], "the second would never run"
    assert len(told) == len(sentences()) > 120


@pytest.mark.parametrize("seed", range(10))
def test_two_stores_that_are_the_same_agree(seed: int) -> None:
    sim_run(lambda: agree(MemoryStores(), MemoryStores(), seed=seed, acts=300), seed=seed)


class Forgetful(MemoryStores):
    """One thing is another than it should be."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        store, _, method = what.partition(".")
        setattr(getattr(self, store), method, self.answer)

    async def answer(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    "what",
    [
        *("runs.add", "runs.claim", "runs.requeue", "events.append", "journal.append", "graphs.save"),
        *("graphs.archive", "approvals.ask", "approvals.withdraw", "cancels.put", "cancels.drop"),
        *("chats.rename", "chats.add_messages", "chats.choose", "chats.attach", "memories.put"),
    ],
)
def test_two_stores_that_differ_do_not_agree_for_long(what: str) -> None:
    async def main() -> None:
        await agree(MemoryStores(), Forgetful(what), seed=3, acts=1_000)

    with pytest.raises(AssertionError, match="seed 3, "):
        sim_run(main, seed=0)
