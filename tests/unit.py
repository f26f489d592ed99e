"""Which tests `make check` runs: all but those listed here, those marked `reliability`, and those on PostgreSQL.

A test belongs here if it starts processes or servers, opens databases, explores many schedules, or is otherwise too
slow for the inner loop. `pytest --unit` leaves these files out before it imports them; `make test` runs everything.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent

NOT_UNIT = (
    "cli",
    "engines",
    "gateway",
    "providers",
    "realmodel",
    "reliability",
    "scenarios",
    "server",
    "storage",
    "telemetry",
    "ui",
    "chat/test_conversation.py",
    "containment/test_accounts.py",
    "docs/test_stories.py",
    "flow/test_isolation.py",
    "hosting/test_crash_loop.py",
    "hosting/test_elapsed.py",
    "hosting/test_grants.py",
    "hosting/test_on_databases.py",
    "kernel/test_frontier.py",
    "kernel/test_inv_07_bad_graphs.py",
    "nodes/test_memory_hosted.py",
    "runtime/billing/test_loading_prices.py",
    "runtime/durable/test_journal_interrupted.py",
    "runtime/durable/test_journal_keys.py",
    "runtime/scheduling/test_exclusive.py",
    "testing/test_http_provider.py",
    "test_docs.py",
    "test_docs_cover_the_api.py",
    "test_forked.py",
    "test_import_cost.py",
    "test_structure_script.py",
    "tools/test_site.py",
    "tools/test_ui_types.py",
)
"""Folders and files, relative to this one."""

SLOW = {
    "test_a_model_is_found_and_costs_the_same_as_in_genai_prices",
    "test_a_thousand_small_schedules_take_less_than_a_few_seconds_of_one_core",
    "test_an_agent_that_is_stopped_at_any_moment_leaves_nothing_behind",
    "test_events_received_and_missed_add_up_to_all_events",
    "test_memory_does_not_grow_with_the_length_of_a_chain_of_calls_that_each_outlive_their_maker",
    "test_memory_does_not_grow_with_the_number_of_calls",
    "test_no_cancel_is_lost_at_any_moment_of_a_run",
    "test_no_interleaving_breaks_the_life_of_a_node",
    "test_no_interleaving_makes_an_artifact_twice_at_once_or_leaves_one_behind",
    "test_reading_ten_thousand_calls_keeps_writers_out_for_less_than_five_ms",
    "test_room_for_five_and_fifty_threads_admit_exactly_five",
    "test_sixty_four_threads_never_pass_a_ceiling_on_two_levels_and_leave_exact_sums",
    "test_sixty_four_threads_with_a_thousand_calls_each_lose_and_double_nothing",
    "test_ten_thousand_calls_are_a_page_of_a_few_megabytes",
    "test_the_cap_is_one_over_the_whole_nest",
    "test_the_tools_of_a_real_server_are_called",
    "test_two_parents_with_eight_children_each_hold_their_ceilings_all_at_once",
    "test_whatever_happens_every_step_that_began_has_one_end_and_no_task_is_left",
    "test_whichever_call_of_a_store_fails_the_run_ends_as_if_none_had",
}
"""Tests of other files that take more than a second: many threads, schedules or calls."""


def is_unit(path: Path) -> bool:
    """Whether the tests of that file or folder are unit tests."""
    return not any(path.is_relative_to(TESTS / name) for name in NOT_UNIT)


def is_unit_test(item: pytest.Item) -> bool:
    """Whether a test of such a file is a unit test itself."""
    is_slow = getattr(item, "originalname", None) in SLOW
    return item.get_closest_marker("reliability") is None and not is_slow and not _needs_postgres(item)


def _needs_postgres(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    is_parameter = any(isinstance(value, str) and value.startswith("postgres") for value in parameters.values())
    return is_parameter or "postgres_server" in getattr(item, "fixturenames", ())
