"""The suites of the service's stores find what is wrong with a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from penstock.nodes import memory
from penstock.storage import rules
from penstock.storage.memory import MemoryStores, approvals, chats, events, graphs, memories, runs
from penstock.storage.memory.record_codec import RecordCodec
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
    (
        runs,
        "_is_free",
        lambda run, now_ms: run.status == "queued",
        "a_run_is_taken_over_when_its_lease_has_expired_and_not_before",
    ),
    (
        runs,
        "_is_free",
        lambda run, now_ms: run.status not in runs.ENDED,
        "concurrent_takeovers_give_the_run_to_one_worker",
    ),
    (runs, "_is_free", always(True), "only_queued_and_expired_runs_can_be_claimed"),
    (runs, "_age", lambda run: (0, run.id), "runs_are_listed_newest_first_then_by_id"),
    (runs, "_age", lambda run: run.created_ms, "pages_follow_each_other"),
    (runs, "check_transition", nothing, "updates_follow_the_transition_table"),
    (runs, "check_transition", nothing, "ending_an_unclaimed_run_follows_the_transition_table"),
    (runs, "check_transition", nothing, "requeuing_follows_the_transition_table"),
    (rules, "SUBMITTED_FIELDS", (), "an_id_that_is_taken_by_another_run_is_a_conflict"),
    (runs, "UNCLAIMED", {}, "a_worker_updates_its_claimed_run"),
    (runs, "CLEARED", {}, "a_requeued_run_has_no_result_and_may_have_other_limits"),
    (runs, "CHANGEABLE", tuple(runs.RunRecord._fields), "changes_that_a_worker_may_not_make_are_refused"),
    (runs.MemoryRunStore, "fence", nothing, "a_fenced_worker_appends_no_events"),
    (runs.MemoryRunStore, "fence", nothing, "a_fenced_worker_appends_no_entries"),
    (runs.MemoryRunStore, "renew", first_only, "a_lease_is_renewed_only_for_its_worker"),
    (runs.MemoryRunStore, "on_remove", nothing, "old_runs_are_removed_with_all_their_data"),
    (runs.MemoryRunStore, "_unchanged", lambda self, run, after, why: run, "an_unclaimed_run_is_not_updated"),
    (events, "_check_known", always(0), "events_already_stored_are_skipped"),
    (events, "_check_known", always(0), "a_gap_is_a_conflict_and_nothing_is_stored"),
    (events, "_check_known", lambda id, stored, new: len(stored), "a_different_event_with_the_same_seq_is_a_conflict"),
    (events, "ENTRY", RecordCodec(events.JournalEntry, documents=("value",)), "entries_are_written_all_or_none"),
    (
        events,
        "wait_until",
        lambda notifier, topic, condition, timeout_s: _immediately(condition),
        "waiting_ends_with_the_next_event",
    ),
    (graphs, "check_expected_version", nothing, "a_version_that_is_not_the_expected_one_is_a_conflict"),
    (graphs, "_digest", always("0" * 64), "every_change_is_a_version"),
    (
        approvals,
        "APPROVAL_ANSWERS",
        approvals.APPROVAL_STATES,
        "questions_and_answers_that_cannot_be_stored_are_refused",
    ),
    (approvals.MemoryApprovalStore, "_of_key", always(None), "a_question_is_put_once_by_its_run_and_key"),
    (approvals.MemoryApprovalStore, "_remove_run", nothing, "old_runs_are_removed_with_all_their_data"),
    (chats, "new_messages", lambda known, new: new, "messages_are_added_all_or_none_each_below_an_existing_one"),
    (rules, "is_same_message", always(True), "an_existing_message_is_skipped_if_every_field_is_equal"),
    (chats, "is_same_message", always(False), "an_answer_that_was_being_written_is_finished_once"),
    (chats._Chat, "bring_into_view", nothing, "added_and_chosen_messages_are_in_view_with_their_ancestors"),
    (chats, "_use", lambda chat: (0, chat.id), "chats_are_listed_by_last_use_a_page_at_a_time"),
    (rules, "is_same_message", always(False), "a_chat_is_the_same_whichever_call_fails"),
    (memories, "_drop_oldest", nothing, "the_oldest_memory_of_a_full_space_is_removed"),
    (
        memories,
        "encode_memory",
        lambda space, key, value: memories.EncodedMemory("1", frozenset({"word"})),
        "a_memory_is_found_in_its_space_only",
    ),
    (memories.InProcessMemory, "_remove_space", nothing, "the_private_memories_of_a_run_are_removed_with_it"),
    (memory, "words_sought", lambda text: text.split(), "a_search_ranks_by_shared_words_then_by_age"),
    (memory, "words_of", lambda key, value: {"word"}, "a_memory_is_found_by_the_words_of_its_key"),
    (graphs.MemoryGraphStore, "_decode", lambda self, graph: graph, "a_graph_is_read_back_unchanged"),
]
"""What is broken, how, and the beginning of the sentence that says so."""


async def _immediately(condition: Callable[[], bool]) -> bool:
    return condition()


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


def test_no_two_suites_have_a_test_name_in_common() -> None:
    suites = [suite for suite in StoresContract.__mro__ if suite is not StoresContract]
    names = Counter(name for suite in suites for name in vars(suite) if name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == [], "the second would never run"
    assert len(names) == len(sentences()) > 120


@pytest.mark.parametrize("seed", range(10))
def test_equal_stores_agree(seed: int) -> None:
    sim_run(lambda: agree(MemoryStores(), MemoryStores(), seed=seed, operations=300), seed=seed)


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
def test_different_stores_do_not_agree_for_long(what: str) -> None:
    async def main() -> None:
        await agree(MemoryStores(), Forgetful(what), seed=3, operations=1_000)

    with pytest.raises(AssertionError, match="seed 3, "):
        sim_run(main, seed=0)
