"""A run as a tree to read, as JSON and as Mermaid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import (
    Budget,
    ExecutionConfig,
    ExecutionContext,
    ExecutionGraph,
    FunctionNode,
    Graph,
    Halted,
    InvalidValue,
    RunSettings,
)
from penstock.testing import ManualClock
from penstock.tracing.redaction import REDACTED, redact
from penstock.tracing.tree import trace_data, trace_json, trace_mermaid, trace_tree


def run_named(name: str = "main", **settings: Any) -> tuple[ExecutionContext, ManualClock]:
    clock = ManualClock()
    return ExecutionContext(name=name, clock=clock, **settings), clock


def ask(context: ExecutionContext, model: str, tokens: int) -> None:
    def answer() -> None:
        context.report(input_tokens=tokens, cost_usd=0, model=model)

    context.llm(answer, name=model, model=model)


SEED = """\
ExecutionContext "main"
├── IterationStartTrace {iteration: 1}
├── ModelCallTrace {model: "claude-3", tokens: 1500}
├── IterationEndTrace {iteration: 1, action: continue}
├── IterationStartTrace {iteration: 2}
├── ModelCallTrace {model: "claude-3", tokens: 2000}
├── ToolCallTrace {tool: "search", duration: 500ms}
├── IterationEndTrace {iteration: 2, action: continue}
├── IterationStartTrace {iteration: 3}
├── ModelCallTrace {model: "claude-3", tokens: 800}
├── ChildSpawnTrace {name: "compaction"}
│   └── ExecutionContext "compaction" (child)
│       ├── IterationStartTrace {iteration: 1}
│       ├── ModelCallTrace {model: "claude-3-haiku", tokens: 3000}
│       ├── IterationEndTrace {iteration: 1, action: continue}
│       ├── IterationStartTrace {iteration: 2}
│       ├── ModelCallTrace {model: "claude-3-haiku", tokens: 500}
│       └── IterationEndTrace {iteration: 2, action: terminate}
├── ChildCompleteTrace {name: "compaction", reason: success}
├── IterationEndTrace {iteration: 3, action: continue}
├── IterationStartTrace {iteration: 4}
├── ModelCallTrace {model: "claude-3", tokens: 1200}
└── IterationEndTrace {iteration: 4, action: terminate}

Stats (auto-aggregated, includes children):
  TotalInputTokens: 9000
  TotalOutputTokens: 0
  TotalCost: $0.00
  InputTokensByModel: {"claude-3": 5500, "claude-3-haiku": 3500}
  OutputTokensByModel: {}
  CostByModel: {}
  ToolCallCount: 1
  ToolCallsByName: {"search": 1}"""


def compacting_run() -> ExecutionContext:
    run, clock = run_named()
    with run:
        for number, tokens in enumerate((1500, 2000, 800, 1200), 1):
            run.start_iteration()
            ask(run, "claude-3", tokens)
            if number == 2:
                run.tool(lambda: clock.advance(0.5), name="search")
            if number == 3:
                with run.spawn_child("compaction") as child:
                    for inner, action in ((3000, "continue"), (500, "terminate")):
                        child.start_iteration()
                        ask(child, "claude-3-haiku", inner)
                        child.end_iteration(action)
            run.end_iteration("terminate" if number == 4 else "continue")
    return run


@pytest.mark.requirement("T-11")
def test_the_tree_prints_as_it_was_designed() -> None:
    assert trace_tree(compacting_run()) == SEED


@pytest.mark.requirement("T-11")
def test_json_matches_the_snapshot() -> None:
    run = compacting_run()
    data = json.loads(trace_json(run))
    snapshot = run.graph.snapshot()
    calls = {call["node_id"]: call for call in data["calls"]}
    assert calls.keys() == snapshot["nodes"].keys()
    for node_id, node in snapshot["nodes"].items():
        assert {name: calls[node_id][name] for name in node} == node
    assert data["seq"] == snapshot["seq"] == len(data["events"])
    assert (data["status"], data["termination_reason"], data["duration_ms"]) == ("success", "success", 500.0)
    assert data["stats"]["total_input_tokens"] == 9000


@pytest.mark.requirement("T-11")
def test_the_mermaid_chart_has_every_call_under_the_one_that_made_it() -> None:
    chart = trace_mermaid(compacting_run())
    assert chart.startswith('flowchart TD\n    c1["✓ main"]:::success\n    c2["✓ claude-3<br/>llm claude-3"]')
    assert chart.count("-->") == 8
    assert "c6 --> c7" in chart


def test_a_child_is_shown_with_its_own_part_only() -> None:
    run = compacting_run()
    child = run.children[0]
    assert trace_tree(child).splitlines()[:2] == [
        'ExecutionContext "compaction" (child)',
        "├── IterationStartTrace {iteration: 1}",
    ]
    assert "  TotalInputTokens: 3500" in trace_tree(child)
    assert [call["name"] for call in trace_data(child)["calls"]] == ["compaction", "claude-3-haiku", "claude-3-haiku"]
    assert trace_mermaid(child).count("-->") == 2


def test_a_bare_recorder_is_shown_without_limits() -> None:
    run = compacting_run()
    assert trace_tree(run.graph) == trace_tree(run)
    assert trace_data(run.graph)["limits"] == []


def test_a_recorder_with_nothing_in_it_can_be_shown() -> None:
    graph = ExecutionGraph("empty")
    assert trace_tree(graph) == "(nothing was recorded)"
    assert trace_data(graph)["calls"] == []
    assert trace_mermaid(graph).startswith("flowchart TD\n    classDef")


def test_what_is_neither_context_nor_recorder_is_refused() -> None:
    with pytest.raises(InvalidValue, match="ExecutionContext"):
        trace_tree("run")  # type: ignore[arg-type]


def test_limits_are_shown_with_what_was_used_and_which_one_stopped_the_run() -> None:
    config = ExecutionConfig(max_cost_usd=0.05, max_steps=10, max_retries_total=2, timeout_ms=1_000)
    run, clock = run_named(config=config)
    with run, pytest.raises(Halted), run.spawn_child("cheap", budget=Budget(max_cost_dollars=0.01)) as child:
        child.tool(lambda: clock.advance(0.25), cost_hint_usd=0.01)
        child.tool(lambda: None, cost_hint_usd=0.01)
    clock.advance(60)
    meters = {(m["budget"], m["unit"]): (m["used"], m["ceiling"], m["tripped"]) for m in trace_data(run)["limits"]}
    assert meters == {
        ("main", "usd"): (0.01, 0.05, False),
        ("main", "steps"): (1, 10, False),
        ("main", "retries"): (0, 2, False),
        ("main", "seconds"): (0.25, 1.0, False),
        ("cheap", "usd"): (0.01, 0.01, True),
    }


def test_of_budgets_with_one_name_the_fullest_is_shown() -> None:
    run, _ = run_named()
    with run:
        for cost in (0.01, 0.03, 0.02):
            with run.spawn_child("worker", budget=Budget(max_cost_dollars=0.1)) as child:
                child.tool(lambda: None, cost_hint_usd=cost)
    assert [(m["budget"], m["used"]) for m in trace_data(run)["limits"]] == [("worker", 0.03)]


def test_stop_is_shown_where_it_happened() -> None:
    run, _ = run_named(config=ExecutionConfig(max_cost_usd=None, max_steps=0, max_retries_total=None))
    with run, pytest.raises(Halted):
        run.tool(lambda: None, name="buy")
    assert trace_tree(run).splitlines()[:4] == [
        'ExecutionContext "main"',
        '├── ToolCallTrace {tool: "buy", halted: "step_limit_exceeded: 0 of the 0 steps of \'main\' used"}',
        '│   └── LimitTrace {stop_reason: step_limit_exceeded, budget: "main", '
        "message: \"0 of the 0 steps of 'main' used\"}",
        "└── RunCompleted {reason: limit_exceeded}",
    ]


def test_running_call_is_marked() -> None:
    run, _ = run_named()
    shown: list[str] = []
    with run:
        run.tool(lambda: shown.append(trace_tree(run)), name="look")
    assert '└── ToolCallTrace {tool: "look", status: running}' in shown[0]


async def test_steps_of_a_graph_hold_the_calls_made_in_them() -> None:
    run, _ = run_named()

    def work(context: ExecutionContext) -> int:
        return context.tool(lambda: 1, name="inside")

    graph = Graph("g")
    graph.add_step(FunctionNode("a", work), "first")
    with run:
        await graph.execute(run)
    lines = trace_tree(run).splitlines()
    step = next(at for at, line in enumerate(lines) if 'StepTrace {step: "first"' in line)
    assert lines[step + 1].lstrip("│ ").startswith('└── ToolCallTrace {tool: "inside"')


def test_a_tree_deeper_than_the_interpreter_is_drawn() -> None:
    run, _ = run_named()
    graph = run.graph
    parent = "n000001"
    for _ in range(3_000):
        parent = graph.begin_node(parent, "tool", "deeper")
    text = trace_tree(run, max_lines=5_000)
    assert text.count("deeper") == 3_000
    assert trace_mermaid(run, max_calls=5_000).count("-->") == 3_000
    run.end()


def test_a_long_run_is_cut_and_counted() -> None:
    run, _ = run_named()
    with run:
        for _ in range(50):
            run.tool(lambda: None, name="again")
    assert trace_tree(run, max_lines=11).splitlines()[11] == "… and 40 more lines"
    assert trace_mermaid(run, max_calls=11).count('["✓ again<br/>tool"]') == 10
    assert "… and 40 more calls" in trace_mermaid(run, max_calls=11)


def test_what_was_folded_away_is_counted() -> None:
    run, _ = run_named(settings=RunSettings(max_kept_calls=5))
    with run:
        for _ in range(2_000):
            run.tool(lambda: None, name="again", cost_hint_usd=0.001)
    data = trace_data(run)
    assert len(data["calls"]) == 5
    assert data["calls"][0]["metadata"]["folded"]["calls"] == 1_996
    assert data["stats"]["tool_call_count"] == 2_000
    assert f"… {data['dropped_events']} earlier events are no longer kept" in trace_tree(run)


SECRETS: list[tuple[object, object]] = [
    ("Authorization: Bearer abc.def-123", f"Authorization: {REDACTED}"),
    ("sent Bearer abc.def-123 twice", f"sent Bearer {REDACTED} twice"),
    ("key sk-proj-abcdef123456 was refused", f"key {REDACTED} was refused"),
    ("https://user:hunter2@host/path", f"https://{REDACTED}@host/path"),
    ("?api_key=abcdef&page=2", f"?api_key={REDACTED}&page=2"),
    ("password: hunter2, user: joe", f"password: {REDACTED}, user: joe"),
    ('{"client_secret": "abc123"}', f'{{"client_secret": "{REDACTED}"}}'),
    ("ghp_abcdefghijklmnop1234", REDACTED),
    ("AKIAABCDEFGHIJKLMNOP", REDACTED),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", REDACTED),
    ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- end", f"{REDACTED} end"),
    ("-----BEGIN PRIVATE KEY-----\ncut off", REDACTED),
    ("Cookie: a=1; b=2\nnext", f"Cookie: {REDACTED}\nnext"),
    ("canary-0123abcd", REDACTED),
    (
        {"apiKey": "abc", "api_key": 5, "X-Api-Key": ["a"], "page": 2},
        {"apiKey": REDACTED, "api_key": REDACTED, "X-Api-Key": REDACTED, "page": 2},
    ),
    ({"db": {"password": {"old": "a"}}}, {"db": {"password": REDACTED}}),
    (
        {"session_token": "abc", "has_token": True, "token": None},
        {"session_token": REDACTED, "has_token": True, "token": None},
    ),
]


@pytest.mark.parametrize(("value", "shown"), SECRETS, ids=lambda value: str(value)[:30])
def test_what_looks_like_a_secret_is_not_shown(value: object, shown: object) -> None:
    assert redact(value) == shown


@pytest.mark.parametrize(
    "value",
    [
        {"input_tokens": 1500, "max_tokens": 5, "tokens": "many", "monkey": "see", "keyboard": "qwerty"},
        {"author": "me", "secretary": "Ann", "authority": "none"},
        "token_limit_exceeded: 5 of the 5 tokens of 'main' used",
        "Basic functionality, the bearer of news, a risk-assessment, task-1234567890",
        "budget_exceeded: $0.01 spent of the $0.12 of 'team'; the call would hold $5.00",
        "https://host/path?page=2",
        "01a1df73-ea52-76ad-9018-d31d829b268b",
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_only_resembles_a_secret_is_shown(value: object) -> None:
    assert redact(value) == value


def test_given_secrets_are_hidden_in_texts_and_keys_wherever_they_stand() -> None:
    value = {"note": "the dam is called Itaipu, Itaipu!", "Itaipu": ["x-Itaipu-y"]}
    assert redact(value, ["Itaipu"]) == {
        "note": f"the dam is called {REDACTED}, {REDACTED}!",
        REDACTED: [f"x-{REDACTED}-y"],
    }


@pytest.mark.parametrize("secrets", [[""], ["abc"], [5]])
def test_secrets_too_short_to_look_for_are_refused_and_not_repeated(secrets: list[Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        redact("text", secrets)
    assert "abc" not in str(caught.value)


@pytest.mark.parametrize(
    "part", ["a-", "token", "Basic ", "://a:", "eyJ", "password=", "-----BEGIN PRIVATE KEY", "sk-"]
)
def test_a_text_made_to_be_slow_is_read_all_the_same(part: str) -> None:
    assert len(redact(part * 100_000)) <= 2_001


def test_half_a_secret_at_the_cut_is_not_shown() -> None:
    text = "ghp_" + "a" * 19_000 + " " + "x" * 985 + "Itaipu-dam-secret-word"
    assert "Itai" not in redact(text, ["Itaipu-dam-secret-word"])


names = st.text(max_size=40) | st.sampled_from(
    ['"]; click c1 "javascript:x"', "a\nb", "\u202e", "]]-->", "#quot;", "`x`"]
)


def test_text_that_cannot_be_written_is_written_with_marks() -> None:
    run, _ = run_named("half \ud800 a pair")
    run.end()
    assert trace_data(run)["name"] == "half ? a pair"
    trace_json(run).encode()


@given(name=names, model=names | st.none())
def test_no_name_is_read_as_syntax(name: str, model: str | None) -> None:
    run, _ = run_named()
    with run:
        run.llm(lambda: None, name=name or "x", model=model or None)
    lines = trace_mermaid(run).splitlines()
    assert len(lines) == 8
    assert re.fullmatch(r'    c2\["[^"\]\[<>`{}|]*(<br/>[^"\]\[<>`{}|]*)*"\]:::success', lines[2])
    assert len(trace_tree(run).splitlines()) == 12
    assert all(char.isprintable() for line in trace_tree(run).splitlines() for char in line)
    assert json.loads(trace_json(run))["calls"][1]["kind"] == "llm"


@pytest.mark.parametrize("form", [trace_tree, trace_json, trace_mermaid])
def test_showing_a_run_changes_nothing_in_it(form: Callable[[ExecutionContext], str]) -> None:
    run = compacting_run()
    before = run.graph.snapshot()
    assert form(run) == form(run)
    after = run.graph.snapshot()
    assert before == after
