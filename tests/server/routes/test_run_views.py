"""Views of a run: its call tree as columns agrees with its events, and its budgets with the ledger."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.hosting import call_columns
from penstock.hosting.call_columns import ABANDONED, COST_UNKNOWN, REPLAYED, WAITED, CallColumns
from penstock.hosting.host import HostSettings
from penstock.hosting.ports import HostedEvent
from penstock.hosting.run_explanation import explain_columns
from penstock.runtime.billing.usage import Usage
from tests.hosting.graphs import graph
from tests.server.served import GATE, Served, served

READ = graph(("in", "input", {}), ("read", "llm-completion", {"model": "m"}), edges="in>read")
EACH = graph(("in", "input", {}), ("each", "map", {"graph": READ}), edges="in>each")


def models() -> dict[str, Any]:
    usage = Usage.of(cost_usd="0.01", input_tokens=3, output_tokens=5)
    return {"m": ScriptedModel(lambda request: "answer", usage=usage)}


async def ran(server: Served, document: Any, input: Any, **limits: Any) -> str:
    await server.save("g", document)
    run = await server.host.submit(owner="ann", graph_id="g", input=input, limits=limits)
    await server.host.wait(run.id)
    return run.id


async def test_tree_has_every_call_that_the_events_have() -> None:
    async with served(models=models()) as server, server.client("ann") as ann:
        run_id = await ran(server, EACH, ["a", "b", "c"])
        tree = (await ann.get(f"/api/runs/{run_id}/tree")).json()
        run = (await ann.get(f"/api/runs/{run_id}")).json()
        events = [event async for event in server.host.events(run_id)]
    columns, strings = tree["columns"], tree["strings"]
    started = [event.data for event in events if event.type == "call.started"]
    assert [f"n{number:06d}" for number in columns["call"]] == [call["call_id"] for call in started]
    rows = {call["call_id"]: row for row, call in enumerate(started)}
    assert columns["parent"] == [rows.get(call["parent_id"], -1) for call in started]
    assert [None if node < 0 else strings[node] for node in columns["node"]] == [
        call.get("node_id") for call in started
    ]
    assert [tree["kinds"][kind] for kind in columns["kind"]] == [call["kind"] for call in started]
    assert {tree["statuses"][status] for status in columns["status"]} == {"success"}
    assert sum(columns["cost_nanos"]) == run["cost_nanos"] == 30_000_000
    assert (sum(columns["tokens_in"]), sum(columns["tokens_out"])) == (9, 15)
    assert all(start <= end for start, end in zip(columns["start_ms"], columns["end_ms"], strict=True))
    assert (tree["last_seq"], tree["calls"], tree["truncated"]) == (run["last_seq"], len(started), False)


async def test_part_of_a_tree_is_a_call_and_what_is_below_it_to_a_depth() -> None:
    async with served(models=models()) as server, server.client("ann") as ann:
        run_id = await ran(server, EACH, ["a", "b"])
        whole = (await ann.get(f"/api/runs/{run_id}/tree")).json()

        def calls(tree: dict[str, Any]) -> dict[int, tuple[int | None, str]]:
            """Return the parent of each call, and its name."""
            columns, strings = tree["columns"], tree["strings"]
            parents = [None if row < 0 else columns["call"][row] for row in columns["parent"]]
            names = [strings[name] for name in columns["name"]]
            return dict(zip(columns["call"], zip(parents, names, strict=True), strict=True))

        async def part(**query: Any) -> dict[str, Any]:
            return (await ann.get(f"/api/runs/{run_id}/tree", params=query)).json()  # type: ignore[no-any-return]

        every = calls(whole)
        for top in every:
            below = {top: (None, every[top][1])}
            for call_id, (parent, name) in every.items():  # a call comes after the one that made it
                if parent in below:
                    below[call_id] = (parent, name)
            tree = await part(under=f"n{top:06d}")
            assert calls(tree) == below
            assert (tree["calls"], tree["truncated"]) == (len(below), False)
            assert len(tree["strings"]) <= len(whole["strings"])
        shallow = await part(depth=1)
        assert calls(shallow) == {id: one for id, one in every.items() if one[0] in (None, 1)}
        assert (shallow["calls"], shallow["truncated"]) == (len(every), True)
        assert shallow["last_seq"] == whole["last_seq"]
        assert calls(await part(depth=0)) == {1: every[1]}
        assert calls(await part(depth=100)) == every
        assert calls(await part(under="n000001", depth=1)) == calls(shallow)
        assert (await ann.get(f"/api/runs/{run_id}/tree", params={"under": "n999999"})).status_code == 404
        assert (await ann.get(f"/api/runs/{run_id}/tree", params={"depth": -1})).status_code == 422


async def test_refused_call_is_in_the_tree_with_its_stop() -> None:
    async with served(models=models()) as server, server.client("ann") as ann:
        run_id = await ran(server, READ, "a", max_steps=1)
        tree = (await ann.get(f"/api/runs/{run_id}/tree")).json()
    stops = [tree["stops"][at] for at in tree["columns"]["stop"] if at >= 0]
    (cause,) = [stop for stop in stops if stop["cause"]]
    assert (cause["reason"], cause["whose"], cause["unit"], cause["limit"]) == (
        "step_limit_exceeded",
        "run",
        "steps",
        1.0,
    )


async def test_run_is_explained_call_by_call_with_whose_limit_stopped_it_and_what_helps() -> None:
    async with served(models=models()) as server, server.client("ann") as ann, server.client("bob") as bob:
        ended = await ran(server, EACH, ["a", "b"])
        whole = (await ann.get(f"/api/runs/{ended}/explain")).json()
        halted = await ran(server, READ, "a", max_steps=1)
        stopped = (await ann.get(f"/api/runs/{halted}/explain")).json()
        run = (await ann.get(f"/api/runs/{halted}")).json()
        tree = (await ann.get(f"/api/runs/{ended}/tree")).json()
        assert (await bob.get(f"/api/runs/{ended}/explain")).status_code == 404
    lines = whole["text"].splitlines()
    assert len(lines) == tree["calls"]
    assert "$0.02" in lines[0]  # the cost of everything below
    models_called = [line for line in lines if "llm m" in line or "llm scripted" in line]
    assert len(models_called) == 2
    assert all("✓" in line and "$0.01" in line and "3→5 tokens" in line for line in models_called)
    assert (whole["error"], whole["halted_by"], whole["advice"], whole["left_out"]) == (None, None, [], 0)
    assert [stopped[name] for name in ("status", "error", "halted_by", "advice")] == [
        run[name] for name in ("status", "error", "halted_by", "advice")
    ]
    assert stopped["advice"]
    assert "■" in stopped["text"]
    assert run["error"] in stopped["text"]


async def test_tree_of_a_run_in_progress_grows_with_its_events() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("gate", GATE)
        run = await server.host.submit(owner="ann", graph_id="gate")
        async with aclosing(server.host.events(run.id)) as events:
            async for event in events:
                if event.type == "call.started" and event.data.get("node_id") == "gate":
                    break
        tree = (await ann.get(f"/api/runs/{run.id}/tree")).json()
        assert tree["columns"]["end_ms"].count(-1) == 2
        assert tree["status"] == "running"
        server.gate.opened.set()
        await server.host.wait(run.id)
        whole = (await ann.get(f"/api/runs/{run.id}/tree")).json()
    assert -1 not in whole["columns"]["end_ms"]
    assert whole["columns"]["call"][: tree["calls"]] == tree["columns"]["call"]
    assert whole["status"] == "completed"


def call(seq: int, type: str, id: str = "n000001", **data: Any) -> HostedEvent:
    about = {"call_id": id, "parent_id": None, "kind": "llm", "name": "m", **data}
    return HostedEvent(seq, seq * 10, type, about)


ENDED = {"status": "success", "cost_usd": 0.01, "tokens_in": 1, "tokens_out": 2}


def test_flags_and_late_bills_are_in_the_columns() -> None:
    tree = CallColumns()
    tree.add(
        [
            HostedEvent(1, 10, "run.started", {"epoch": 1}),
            call(2, "call.waiting"),
            call(3, "call.started", attempt=2, replayed=True),
            call(4, "call.ended", **{**ENDED, "cost_usd": None, "abandoned": True}),
            call(5, "call.settled", cost_usd=0.02, tokens_in=4, tokens_out=5),
        ]
    )
    columns = tree.columns
    assert columns["flags"].tolist() == [WAITED | ABANDONED | COST_UNKNOWN]
    assert (columns["cost_nanos"][0], columns["tokens_in"][0], columns["attempt"][0]) == (20_000_000, 5, 2)
    assert (columns["start_ms"][0], columns["end_ms"][0]) == (20, 30)


def test_explanation_is_plain_text_of_bounded_length_in_any_shape_of_tree() -> None:
    tree = CallColumns()
    failed = {**ENDED, "status": "fail", "cost_usd": None}
    tree.add([HostedEvent(1, 1, "run.started", {"epoch": 1})])
    assert explain_columns(tree) == ("", 0)
    secret = "sk-ant-api03-" + "a" * 80
    below = {"parent_id": "n000001"}
    tree.add(
        [
            call(2, "call.started", name=f"a\n\x1b[31m\u202e {secret}", attempt=2),
            call(3, "call.started", "n000002", **below, name="x" * 5_000),
            call(4, "call.ended", "n000002", **below, **failed),
            call(5, "call.ended", "n000003", **below, **failed, replayed=True),  # one that never started
            call(6, "call.waiting", "n000004", **below),
        ]
    )
    text, left_out = explain_columns(tree)
    lines = text.split("\n")
    assert (len(lines), left_out) == (4, 0)
    assert all(line.isprintable() and len(line) < 500 for line in lines)
    assert secret not in text
    for line, words in zip(
        lines, ("attempt 2", "unknown (1 call)", "from the journal", "waits for a budget"), strict=True
    ):
        assert words in line
    assert "in progress" in lines[0]
    for number in range(5, 3_000):  # each made by the one before: as deep as it gets
        tree.add([call(number + 2, "call.started", f"n{number:06d}", parent_id=f"n{number - 1:06d}")])
    text, left_out = explain_columns(tree)
    assert text.count("\n") + 1 + left_out == len(tree)
    assert left_out > 0
    assert max(map(len, text.split("\n"))) < 500


def test_resumed_run_has_the_calls_of_its_newest_epoch() -> None:
    tree = CallColumns()
    tree.add([HostedEvent(1, 10, "run.started", {"epoch": 1}), call(2, "call.started"), call(3, "call.ended", **ENDED)])
    tree.add([HostedEvent(4, 40, "run.resumed", {"epoch": 2}), call(5, "call.started", replayed=True)])
    assert (tree.epoch, len(tree), tree.columns["flags"].tolist()) == (2, 1, [REPLAYED])


def test_tree_at_the_limit_is_whole_and_one_more_call_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_columns, "MAX_TREE_CALLS", 2)
    tree = CallColumns()
    tree.add([call(1, "call.started", "n000001"), call(2, "call.started", "n000002")])
    assert (tree.to_dict()["calls"], tree.to_dict()["truncated"]) == (2, False)
    tree.add([call(3, "call.started", "n000003"), call(4, "call.ended", "n000003", **ENDED)])
    assert (tree.to_dict()["calls"], tree.to_dict()["truncated"], len(tree)) == (3, True, 2)


async def test_budgets_are_those_of_the_run_and_of_the_days_above_it() -> None:
    settings = HostSettings(tick_s=0.05, drain_s=0, owner_daily_usd="0.5", daily_usd="2")
    async with served(host_settings=settings, models=models()) as server, server.client("ann") as ann:
        run_id = await ran(server, READ, "a", max_cost_usd="0.1")
        found = (await ann.get(f"/api/runs/{run_id}/budgets")).json()
    money = {one["level"]: one["units"][0] for one in found["budgets"]}
    assert {level: (unit["spent"], unit["limit"], unit["left"]) for level, unit in money.items()} == {
        "run": (0.01, 0.1, 0.09),
        "owner": (0.01, 0.5, 0.49),
        "all": (0.01, 2.0, 1.99),
    }


async def test_runs_are_filtered_by_time_reason_cost_and_name_and_sorted_by_cost() -> None:
    async with served(models=models()) as server, server.client("ann") as ann:
        cheap = await ran(server, READ, "a")
        dear = await ran(server, EACH, ["a", "b"])
        halted = await ran(server, READ, "a", max_steps=1)
        first = await server.host.get(cheap)
        assert first is not None

        async def ids(**query: Any) -> list[str]:
            return [run["id"] for run in (await ann.get("/api/runs", params=query)).json()["runs"]]

        assert await ids() == [halted, dear, cheap]
        assert await ids(sort="cost") == [dear, cheap, halted]
        page = (await ann.get("/api/runs", params={"sort": "cost", "limit": 1})).json()
        assert await ids(sort="cost", before=page["next"]) == [cheap, halted]
        assert page["total"] is None
        page = (await ann.get("/api/runs", params={"count": True, "limit": 1, "until": first.created_ms + 1})).json()
        assert (len(page["runs"]), page["total"]) == (1, 1)
        assert (await ann.get("/api/runs", params={"count": True, "limit": 1})).json()["total"] == 3
        assert (await ann.get("/api/runs", params={"count": True, "graph_id": "none"})).json()["total"] == 0
        assert await ids(min_cost_usd=0.015) == [dear]
        assert await ids(stop_reason="step_limit_exceeded") == [halted]
        assert await ids(until=first.created_ms) == []
        assert len(await ids(since=first.created_ms)) == 3
        assert await ids(q=dear[-12:].upper()) == [dear]
        replayed = (await ann.post(f"/api/runs/{cheap}/replay")).json()["id"]
        assert await ids(origin="replay") == [replayed]
        assert await ids(origin="run") == [halted, dear, cheap]
        assert await ids(origin="chat") == []
        for wrong in (
            {"sort": "name"},
            {"stop_reason": "odd"},
            {"since": -1},
            {"q": ""},
            {"origin": "odd"},
            {"min_cost_usd": "nan"},
        ):
            answer = await ann.get("/api/runs", params=wrong)
            assert (answer.status_code, answer.json()["error"]["path"]) == (422, f"query.{next(iter(wrong))}")


async def test_run_in_progress_shows_what_it_has_spent_and_holds() -> None:
    document = graph(
        ("in", "input", {}), ("a", "llm-completion", {"model": "m"}), ("gate", "gate", {}), edges="in>a a>gate"
    )
    async with served(models=models()) as server, server.client("ann") as ann:
        await server.save("g", document)
        run = await server.host.submit(owner="ann", graph_id="g", input="x")
        await server.gate.entered.wait()
        (listed,) = (await ann.get("/api/runs")).json()["runs"]
        shown = (await ann.get(f"/api/runs/{run.id}")).json()
        assert (listed["cost_usd"], listed["live"]["spent_usd"], listed["live"]["api_calls"]) == (0.0, 0.01, 1)
        assert shown["live"] == listed["live"]
        assert listed["live"]["steps"] == 3
        server.gate.opened.set()
        await server.host.wait(run.id)
        (ended,) = (await ann.get("/api/runs")).json()["runs"]
    assert (ended["cost_usd"], ended["live"]) == (0.01, None)


async def test_two_runs_are_compared_by_their_fields_and_the_ends_of_their_nodes() -> None:
    async with served(models=models()) as server, server.client("ann") as ann, server.client("bob") as bob:
        whole, halted = await ran(server, READ, "a"), await ran(server, READ, "a", max_steps=1)
        found = (await ann.get(f"/api/runs/{whole}/diff/{halted}")).json()["differences"]
        assert (await ann.get(f"/api/runs/{whole}/diff/{whole}")).json() == {"differences": []}
        theirs = await server.host.submit(owner="bob", graph_id="g", input="a")
        for one, other in ((whole, theirs.id), (theirs.id, whole)):
            assert (await ann.get(f"/api/runs/{one}/diff/{other}")).status_code == 404
            assert (await bob.get(f"/api/runs/{one}/diff/{other}")).status_code == 404
    by_name = {one["what"]: (one["one"], one["other"]) for one in found}
    assert by_name["status"] == ("completed", "halted")
    assert by_name["cost_usd"] == (0.01, 0.0)
    assert by_name["node read"][0]["status"] == "completed"
    assert by_name["node read"][1]["status"] == "skipped"
    assert "input" not in by_name


async def test_tools_and_mcp_servers_that_graphs_can_name_are_listed() -> None:
    service = served(tools={"search": object()}, mcp={"dams": object()})
    async with service as server, server.client("vera") as vera:
        assert (await vera.get("/api/tools")).json() == {"tools": ["search"]}
        assert (await vera.get("/api/mcp-servers")).json() == {"mcp_servers": ["dams"]}
    async with served() as server, server.client("vera") as vera:
        assert (await vera.get("/api/tools")).json() == {"tools": []}
        assert (await vera.get("/api/mcp-servers")).json() == {"mcp_servers": []}
