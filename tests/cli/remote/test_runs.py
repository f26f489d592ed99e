"""`penstock runs …` against a server: what people see, and how a command leaves."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from penstock.cli import values
from penstock.cli.remote.render import used_by
from penstock.cli.render.text import dollars
from penstock.ids import new_run_id
from penstock.server import schemas
from penstock.server.auth import Token
from penstock.server.examples import example_graphs
from tests.cli.conftest import Ended, Penstock
from tests.cli.remote.live import ANN, BOB, PENSTOCK, TOKENS, Live, cutting, serving


@pytest.fixture
def live() -> Iterator[Live]:
    with serving() as server:
        yield server


@pytest.fixture
def runs(live: Live, penstock: Penstock) -> Any:
    """`penstock runs` with these arguments, at that server."""

    def call(*arguments: object) -> Ended:
        return penstock("runs", *arguments, "--url", live.url)

    return call


def test_a_run_is_started_followed_listed_and_shown(live: Live, runs: Any) -> None:
    begun = runs("start", "pipeline", "--input", '"hello"', "--max-cost", "0.5", "--max-steps", "100")
    run_id = begun.out.partition(":")[0]
    assert begun.out == f"{run_id}: queued; follow it with: penstock runs tail {run_id} --url {live.url}\n"

    tail = runs("tail", run_id)
    assert tail.code == 0
    lines = tail.out.splitlines()
    assert lines[0] == "     1  run.queued"
    spoken = next(line for line in lines if "text.delta" in line)
    assert spoken.endswith(" or tell me how far to count.")  # in one line, however many pieces it came in
    assert sum("text.delta" in line for line in lines) == 2
    assert any("✓ llm " in line and "example · $0.0000" in line for line in lines)
    assert "run.completed" in lines[-1]
    assert lines[-1].endswith(" tokens")

    listed = runs("ls").out.splitlines()
    assert listed[0].split() == ["RUN", "STATUS", "GRAPH", "COST", "TOOK"]
    assert listed[1].split()[:3] == [run_id, "completed", "pipeline@1"]

    shown = runs("show", run_id).out
    assert shown.startswith(f"{run_id}  completed\ngraph    pipeline, version 1\nnodes    ")
    assert "\nowner    local\n" in shown
    assert " of $0.5\n" in shown
    assert "output   You wrote:" in shown


def test_everything_of_a_tail_is_one_event_a_line_and_json_is_json(live: Live, runs: Any) -> None:
    run_id = live.start("pipeline", "hello")
    assert live.ended(run_id) == "completed"
    everything = runs("tail", run_id, "--all").out.splitlines()
    read = [json.loads(line) for line in runs("tail", run_id, "--json").out.splitlines()]
    assert len(everything) == len(read)
    assert [one["seq"] for one in read] == list(range(1, len(read) + 1))
    assert any("call.started" in line for line in everything)


def test_tail_from_the_end_prints_nothing_and_has_the_exit_code_of_the_run(live: Live, runs: Any) -> None:
    run_id = live.start("pipeline", "hello")
    live.ended(run_id)
    last = json.loads(runs("show", run_id, "--json").out)["last_seq"]
    assert runs("tail", run_id, "--after", last) == Ended(0, "", "")
    halted = live.start("pipeline", "hello", max_steps=1)
    live.ended(halted)
    last = json.loads(runs("show", halted, "--json").out)["last_seq"]
    assert runs("tail", halted, "--after", last).code == 3
    ahead = runs("tail", halted, "--after", last + 1)
    assert (ahead.code, ahead.out) == (2, "")
    assert ahead.err == (
        f"penstock: --after {last + 1}: the newest event of {halted} is {last}; use --after {last} or less\n"
    )


@pytest.mark.parametrize("cuts", [[700], [300, 900, 1_500, 2_000]])
def test_tail_over_a_broken_connection_prints_every_event_once(live: Live, penstock: Penstock, cuts: list[int]) -> None:
    run_id = live.start("pipeline", "hello")
    live.ended(run_id)
    whole = penstock("runs", "tail", run_id, "--json", "--url", live.url)
    with cutting(live.url, cuts) as url:
        cut = penstock("runs", "tail", run_id, "--json", "--url", url)
    assert cut == whole
    assert len(whole.out) > max(cuts)


def test_a_server_that_is_gone_is_one_sentence(penstock: Penstock) -> None:
    for command in (["ls"], ["tail", "x"], ["export", "x"], ["cancel", "x"]):
        ended = penstock("runs", *command, "--url", "http://127.0.0.1:9")
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith("penstock: ")
        assert ended.err.count("\n") == 1
        assert "127.0.0.1:9" in ended.err


@pytest.mark.parametrize("command", ["show", "tail", "resume", "replay", "export"])
def test_a_run_that_is_not_there_is_one_sentence(runs: Any, command: str) -> None:
    missing = "there is no such run; none of the newest runs begins or ends with 'nothing'"
    assert runs(command, "nothing") == Ended(2, "", f"penstock: {missing}\n")


@pytest.mark.parametrize("command", ["show", "tail", "resume", "replay", "export", "cancel"])
def test_a_whole_id_of_no_run_is_refused(runs: Any, command: str) -> None:
    ended = runs(command, new_run_id())
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("penstock: there is no such run")


def test_a_run_is_named_by_the_part_of_its_id_that_no_other_run_has(live: Live, runs: Any) -> None:
    first, second = live.start("pipeline", "hello"), live.start("pipeline", "hello")
    live.ended(first), live.ended(second)
    assert runs("show", first[-12:]).out.startswith(f"{first}  completed")
    assert runs("diff", first[-12:], second[-12:]).code == 0
    ambiguous = runs("show", first[:4])
    assert (ambiguous.code, ambiguous.out) == (2, "")
    assert f"'{first[:4]}' matches 2 ids; give more characters of one: " in ambiguous.err
    assert first in ambiguous.err


def test_an_id_that_a_user_chose_is_not_taken_for_a_part_of_another(live: Live, runs: Any) -> None:
    for run_id in ("night", "night-2"):
        live.do(live.host.submit(owner="local", graph_id="pipeline", input="hello", run_id=run_id))
        live.ended(run_id)
    assert runs("show", "night").out.startswith("night  completed")


def test_show_lists_the_nodes_that_a_fork_can_begin_at(live: Live, runs: Any) -> None:
    run_id = live.start("pipeline", "hello")
    live.ended(run_id)
    (line,) = [line for line in runs("show", run_id).out.splitlines() if line.startswith("nodes")]
    nodes = line.removeprefix("nodes").strip().split(", ")
    assert runs("fork", run_id, "--at", nodes[-1]).code == 0


def test_text_is_an_input_without_quotes(live: Live, runs: Any) -> None:
    run_id = runs("start", "pipeline", "--input", "a dam in winter").out.partition(":")[0]
    live.ended(run_id)
    assert live.do(live.host.get(run_id)).input == "a dam in winter"


def test_empty_list_of_runs_is_reported(live: Live, runs: Any) -> None:
    assert runs("ls").out == "no runs\n"
    assert runs("ls", "--status", "failed").out == "no matching runs\n"
    assert runs("ls", "--json").out == "[]\n"


def test_a_state_that_does_not_exist_is_a_wrong_command_line(runs: Any) -> None:
    ended = runs("ls", "--status", "sleeping")
    assert ended.code == 64
    assert "'halted'" in ended.err


def test_a_cancel_that_comes_before_its_run_is_remembered(live: Live, runs: Any) -> None:
    answer = "will be cancelled when it is submitted, or when its server answers"
    refused = runs("cancel", "early")
    assert refused.code == 2
    assert refused.err.endswith("; to cancel a run before it is submitted, use --ahead\n")
    assert runs("cancel", "early", "--ahead").out == f"early: {answer}\n"
    live.do(live.host.submit(owner="local", graph_id="pipeline", input="hello", run_id="early"))
    assert runs("tail", "early").code == 130


def test_a_run_is_cancelled_with_its_reason_and_resumed(penstock: Penstock) -> None:
    with serving(words_per_second=20) as slow:
        at = ("--url", slow.url)
        run_id = slow.start("pipeline", "count to 1000")
        slow.until(run_id, "text.delta")
        assert penstock("runs", "cancel", run_id, "--reason", "wrong question", *at).out == f"{run_id}: cancelled\n"
        tail = penstock("runs", "tail", run_id, *at)
        assert tail.code == 130
        assert "wrong question" in tail.out.splitlines()[-1]
        assert penstock("runs", "cancel", run_id, *at).out == f"{run_id}: already ended\n"
        shown = penstock("runs", "show", run_id, *at).out
        assert "stopped  aborted: wrong question" in shown
        assert f"→ resume it from its journal with: penstock runs resume {run_id} --url {slow.url}" in shown
        assert penstock("runs", "resume", run_id, *at).out.startswith(f"{run_id}: queued;")


def test_halted_run_shows_what_to_grant_and_resumes_with_it(live: Live, runs: Any) -> None:
    run_id = live.start("pipeline", "hello", max_steps=2)
    assert runs("tail", run_id).code == 3
    assert (
        f"→ raise the limit with: penstock runs grant {run_id} --max-steps N --url {live.url}"
        in runs("show", run_id).out
    )
    assert runs("grant", run_id).err == "penstock: name at least one limit to raise, such as --max-cost 0.50\n"
    assert runs("grant", run_id, "--max-steps", 50).out.startswith(f"{run_id}: queued;")
    assert runs("tail", run_id).code == 0
    refused = runs("grant", run_id, "--max-steps", 50)
    assert refused.code == 2
    assert "only a run halted by a limit" in refused.err


def test_run_that_a_grant_cannot_help_is_reported_by_show_and_server(penstock: Penstock) -> None:
    document = deepcopy(dict(example_graphs()["assistant"]))
    document["nodes"][1]["data"]["budget"] = {"max_api_calls": 0}
    with serving(graphs={"small": document}) as live:
        at = ("--url", live.url)
        run_id = live.start("small", "hello")
        assert live.ended(run_id) == "halted"
        assert penstock("runs", "show", run_id, *at).out.endswith(
            "→ raise the 0 api calls of 'assistant' in graph small and start a new run; a grant cannot raise it\n"
        )
        halted_by = json.loads(penstock("runs", "show", run_id, *at, "--json").out)["halted_by"]
        assert (halted_by["whose"], halted_by["node_id"]) == ("node", "assistant")
        refused = penstock("runs", "grant", run_id, "--max-api-calls", 5, *at)
        assert refused.code == 2
        assert "a budget inside its graph (0 of the 0 api calls of 'assistant' used), which no grant" in refused.err


def test_a_run_is_forked_replayed_exported_and_compared(live: Live, runs: Any) -> None:
    run_id = live.start("pipeline", "hello")
    live.ended(run_id)
    forked = runs("fork", run_id, "--at", "writer", "--input", '"shorter"').out.partition(":")[0]
    assert runs("tail", forked).code == 0
    assert runs("fork", run_id, "--at", "unknown").code == 2
    replayed = runs("replay", run_id).out.partition(":")[0]
    replay = runs("tail", replayed)
    assert replay.code == 0
    assert "from the journal" in replay.out

    kept = json.loads(runs("export", run_id).out)
    assert (kept["run"]["id"], kept["graph"]["id"]) == (run_id, "pipeline")
    assert kept["events"][-1]["type"] == "run.completed"
    page = runs("export", run_id, "--html").out
    assert page.startswith("<!doctype html>")
    (embedded,) = re.findall(r'id="trace">(.*?)</script>', page)
    calls = json.loads(embedded)["calls"]
    assert len(calls) == sum(event["type"] == "call.started" for event in kept["events"])
    assert sum(call[8] for call in calls if call[2] == 0) == pytest.approx(kept["run"]["cost_usd"])
    assert runs("diff", run_id, run_id).out == f"{run_id} and {run_id} do not differ\n"
    different = runs("diff", run_id, forked).out
    assert "\nnode writer\n  - {" in different
    assert "“shorter”" in different
    assert "node researcher" not in different
    assert "output" in {one["what"] for one in json.loads(runs("diff", run_id, forked, "--json").out)}


@pytest.mark.parametrize(
    ("reply", "published"),
    [
        (["yes"], "Published: You wrote: “spring”"),
        (["no", "--reason", "not before Monday"], "Not published: not before Monday"),
        (["yes", "--edit", '"Closed."'], "Published: Closed."),
    ],
    ids=["yes", "no", "edit"],
)
def test_what_a_run_asks_is_shown_and_answered(live: Live, runs: Any, reply: list[str], published: str) -> None:
    run_id = live.start("publish", "spring")
    live.until(run_id, "run.waiting")
    shown = runs("show", run_id).out
    assert "waiting" in shown
    assert "question Publish this? You wrote: “spring”" in shown
    assert "\n         value:\n           You wrote: “spring”" in shown
    assert f"→ approve with: penstock runs answer {run_id} yes --url {live.url}" in shown
    assert json.loads(runs("show", run_id, "--json").out)["asked"][0]["value"].startswith("You wrote: “spring”")
    answered = runs("answer", run_id, *reply)
    assert answered.code == 0
    assert answered.out.startswith(f"{run_id}: ")
    assert published in runs("tail", run_id).out
    again = runs("answer", run_id, "yes")
    assert (again.code, "has no open question" in again.err) == (2, True)


def test_a_replay_that_lacks_something_is_not_advised_to_be_resumed(live: Live, runs: Any) -> None:
    run_id = live.start("pipeline", "hello", max_steps=4)
    assert live.ended(run_id) == "halted"
    replayed = runs("replay", run_id).out.partition(":")[0]
    assert runs("tail", replayed).code == 2
    shown = runs("show", replayed).out
    assert "resume" not in shown
    assert f"start a new run with: penstock runs start pipeline --url {live.url}" in shown


def test_tail_without_a_reader_exits_and_the_run_continues(live: Live) -> None:
    run_id = live.start("publish", "spring")
    live.until(run_id, "run.waiting")
    reads, writes = os.pipe()
    os.close(reads)
    command = [*PENSTOCK, "runs", "tail", run_id, "--url", live.url]
    ended = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (0, "")
    run = live.do(live.host.get(run_id))
    assert run is not None
    assert run.status == "waiting"


def test_usage_of_an_active_run_is_taken_from_its_log(live: Live, runs: Any) -> None:
    run_id = live.start("publish", "spring")
    live.until(run_id, "run.waiting")
    shown = runs("show", run_id).out
    so_far = json.loads(runs("show", run_id, "--json").out)["so_far"]
    assert so_far["cost_usd"] > 0
    assert f"\ncost     {dollars(so_far['cost_usd'])} so far of $1\n" in shown
    assert f"\ntokens   {so_far['tokens_in']} in, {so_far['tokens_out']} out so far\n" in shown
    assert runs("ls").out.splitlines()[1].split("  ")[3:] == ["≥ $0.00", "not ended"]

    runs("answer", run_id, "yes")
    assert live.ended(run_id) == "completed"
    record = json.loads(runs("show", run_id, "--json").out)
    assert {name: record[name] for name in so_far} == so_far, "nothing was paid after the question"
    assert "so_far" not in record
    assert "so far" not in runs("show", run_id).out
    assert runs("ls").out.splitlines()[1].split("  ")[3] == dollars(record["cost_usd"])


def test_replayed_call_is_marked_and_not_counted_again(live: Live, runs: Any) -> None:
    run_id = live.start("pipeline", "hello", max_steps=4)
    assert live.ended(run_id) == "halted"
    runs("grant", run_id, "--max-steps", 50)
    assert live.ended(run_id) == "completed"
    calls = [line for line in runs("tail", run_id).out.splitlines() if "call.ended" in line]
    assert [line.endswith(" · from the journal") for line in calls] == [False, True, False]
    kept = json.loads(runs("export", run_id).out)
    used = used_by(event["data"] for event in kept["events"] if event["type"] == "call.ended")
    assert used == {name: kept["run"][name] for name in used}


def test_no_and_something_to_go_on_with_is_refused(runs: Any) -> None:
    assert runs("answer", "x", "no", "--edit", "1").code == 64


def test_who_asks_is_wanted_and_others_runs_are_not_there(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    with serving(tokens=TOKENS) as live:
        run_id = live.start("pipeline", "hello", owner="ann")
        anonymous = penstock("runs", "ls", "--url", live.url)
        assert anonymous.code == 2
        assert anonymous.err == f"penstock: {live.url} needs a token; set PENSTOCK_TOKEN, or use --token\n"
        wrong = penstock("runs", "tail", run_id, "--url", live.url, "--token", "x" * 20)
        assert wrong.code == 2
        assert wrong.err.startswith(f"penstock: {live.url} refuses the token: this server does not know this token; ")
        assert "; set PENSTOCK_TOKEN, or use --token" in wrong.err
        assert "x" * 20 not in wrong.err
        assert (
            penstock("runs", "show", run_id, "--url", live.url, "--token", BOB).err
            == "penstock: there is no such run\n"
        )
        monkeypatch.setenv("PENSTOCK_TOKEN", ANN)
        assert penstock("runs", "tail", run_id, "--url", live.url).code == 0


def test_owners_are_listed_for_admins_only(penstock: Penstock) -> None:
    root = "root-0123456789abcdef"
    with serving(tokens=(*TOKENS, Token.of("root", "admin", root))) as live:
        live.ended(live.start("pipeline", "hello", owner="ann"))
        at = ("--url", live.url, "--token")
        heads, row = penstock("runs", "ls", *at, root).out.splitlines()
        assert heads.split()[:4] == ["RUN", "STATUS", "OWNER", "GRAPH"]
        assert row.split()[1:4] == ["completed", "ann", "pipeline@1"]
        assert "OWNER" not in penstock("runs", "ls", *at, ANN).out
        live.ended(live.start("pipeline", "hello", owner="root"))
        assert penstock("runs", "ls", "--limit", "1", *at, root).out.split()[:3] == ["RUN", "STATUS", "GRAPH"]


def test_missing_graph_is_reported_with_the_existing_ones(runs: Any) -> None:
    ended = runs("start", "nope")
    assert (ended.code, ended.out) == (2, "")
    assert "there is no graph 'nope'; the server has: " in ended.err
    assert "pipeline" in ended.err


def test_what_is_advised_needs_no_address_where_the_environment_has_it(
    live: Live, penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = live.start("pipeline", "hello", max_steps=1)
    live.ended(run_id)
    advised = f"penstock runs grant {run_id} --max-steps N"
    assert f"{advised} --url {live.url}\n" in penstock("runs", "show", run_id, "--url", live.url).out
    monkeypatch.setenv("PENSTOCK_URL", f"{live.url}/")
    assert f"{advised}\n" in penstock("runs", "show", run_id).out


def test_text_that_looks_like_line_ends_or_steers_terminals_is_one_harmless_line(live: Live, runs: Any) -> None:
    run_id = live.start("pipeline", "a\u2028b\u0085c\x1b[31md\x00e")
    assert live.ended(run_id) == "completed"
    tail = runs("tail", run_id)
    assert tail.code == 0
    assert "\x1b" not in tail.out
    assert "\u2028" not in tail.out
    assert [json.loads(line)["seq"] for line in runs("tail", run_id, "--json").out.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["start", "pipeline", "--max-steps", "1_0"], "'--max-steps': '1_0' is not a whole number;"),
        (["start", "pipeline", "--timeout", "١"], "'--timeout': '١' is not a number;"),
        (["grant", "some-run", "--max-tokens", "1.5"], "'--max-tokens': '1.5' is not a whole number;"),
        (
            ["start", "pipeline", "--max-cost", "much"],
            "'--max-cost': it must be a number of US dollars, such as '0.50'",
        ),
        (["grant", "some-run", "--max-cost", "-1"], "'--max-cost': it must be a finite, non-negative number of US"),
        (["ls", "--limit", "501"], "'--limit': it must be 500 or less, not 501;"),
        (["tail", "some-run", "--after", "-1"], "'--after': it must be 0 or more, not -1;"),
    ],
    ids=" ".join,
)
def test_invalid_number_is_refused_without_a_request(penstock: Penstock, arguments: list[str], expected: str) -> None:
    ended = penstock("runs", *arguments, "--url", "http://127.0.0.1:9")
    assert (ended.code, ended.out, ended.err.count("\n")) == (64, "", 1)
    assert expected in ended.err


@pytest.mark.parametrize("wrong", ["a/b", "", "ü", "-x", "\udcff", "x" * 101])
@pytest.mark.parametrize("command", ["start", "show", "tail", "cancel", "resume", "replay", "export", "answer", "diff"])
def test_invalid_id_is_refused_by_argument_without_a_request(command: str, wrong: str, penstock: Penstock) -> None:
    more = {"answer": ["yes"], "diff": ["other"]}.get(command, [])
    ended = penstock("runs", command, "--url", "http://127.0.0.1:1", "--", wrong, *more)
    argument = "GRAPH" if command == "start" else "RUN"
    assert ended.code == 64
    assert f"invalid value for '{argument}': " in ended.err
    assert "is not an id: a letter or digit, then up to 99 letters, digits or any of ._:-" in ended.err


def test_the_other_run_and_the_graph_of_a_list_are_called_by_their_names_too(penstock: Penstock) -> None:
    assert "invalid value for 'OTHER': '../y' is not an id" in penstock("runs", "diff", "one", "../y").err
    assert "invalid value for '--graph': '' is not an id" in penstock("runs", "ls", "--graph", "").err


def test_ids_are_what_servers_take_for_them() -> None:
    assert f"^{values.ID.pattern}$" == schemas.AN_ID


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ("[not json", "--edit is not JSON: "),
        ("@nowhere.json", "--edit: there is no file 'nowhere.json'"),
        ("-", "--edit - is not JSON: "),
    ],
)
def test_what_is_to_go_on_instead_is_called_edit_where_it_is_wrong(
    edit: str, expected: str, penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"not json")))
    ended = penstock("runs", "answer", "R", "yes", "--edit", edit)
    assert (ended.code, expected in ended.err) == (64, True), ended.err
