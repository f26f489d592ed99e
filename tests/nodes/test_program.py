"""Graphs and agents in Python as nodes of hosted runs: their output, their text, and what a change of them does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import BaseModel

from penstock.agents.agent import Agent
from penstock.agents.messages import ToolCall
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool
from penstock.chat.service import ChatService
from penstock.flow.graph import Graph
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import HostedEvent, RunRecord
from penstock.nodes.parts.structure import fingerprint_of, structure_of
from penstock.nodes.program import Program
from penstock.policies import ErrorPolicy
from penstock.runtime.context import ExecutionContext
from penstock.storage.memory import MemoryStores
from tests.chat.chats import ANN, Histories
from tests.nodes.graphs import graph as document
from tests.nodes.graphs import node, registry

pytestmark = pytest.mark.requirement("X-13")

QUICK = HostSettings(tick_s=0.05, drain_s=0)


@dataclass
class Programs:
    """A host that serves programs, and what it has of them."""

    host: RunHost
    chats: ChatService
    stores: MemoryStores
    served: dict[str, Program] = field(default_factory=dict)

    async def serve(self, *targets: Graph | Agent) -> None:
        """Serve these, instead of those of the same name."""
        for program in map(Program.of, targets):
            self.served[program.name] = program
            await self.stores.graphs.save(program.name, "server", program.name, program.document(), now_ms=1)

    async def run(self, name: str, input: Any = None) -> RunRecord:
        run = await self.host.submit(owner=ANN, graph_id=name, input=input)
        return await self.host.wait(run.id)

    async def resume(self, run: RunRecord) -> RunRecord:
        await self.host.resume(run.id)
        return await self.host.wait(run.id)

    async def events(self, run: RunRecord, kind: str) -> list[HostedEvent]:
        return [event async for event in self.host.events(run.id) if event.type == kind]


@asynccontextmanager
async def serving(*targets: Graph | Agent) -> AsyncIterator[Programs]:
    stores, served = MemoryStores(), dict[str, Program]()
    host = RunHost(stores, executors=registry(), services={"programs": served}, settings=QUICK)
    chats = ChatService(host, stores.chats)
    async with host:
        programs = Programs(host, chats, stores, served)
        await programs.serve(*targets)
        yield programs


def counting(*names: str, ran: list[str], broken: str = "", **after: list[str]) -> Graph:
    """A graph of steps, each after the one before it or after those named; each returns its input and its name."""
    made = Graph("chain")
    for number, name in enumerate(names):

        def step(ctx: ExecutionContext, name: str = name) -> str:
            ran.append(name)
            if name == broken:
                raise ValueError(f"{name} is broken")
            return f"{ctx.input}>{name}"

        made.step(step, name, depends_on=after.get(name, list(names[max(0, number - 1) : number])))
    return made


# What programs come to.


async def test_graph_gets_the_input_as_it_is_and_gives_the_result_of_its_last_step() -> None:
    adder = Graph("adder")
    adder.step(lambda ctx: ctx.input["n"] + 1, "one")
    adder.step(lambda ctx: {"sum": ctx.input}, "two", depends_on=["one"])
    async with serving(adder) as programs:
        run = await programs.run("adder", {"n": 3})
        assert (run.status, run.output) == ("completed", {"sum": 4})
        inside = [event.data["data"] for event in await programs.events(run, "node.progress")]
    assert [(one["node"], one["event"]) for one in inside] == [
        ("one", "started"),
        ("one", "completed"),
        ("two", "started"),
        ("two", "completed"),
    ]


async def test_graph_with_several_last_steps_gives_their_results_by_step() -> None:
    both = Graph("both")
    both.step(lambda ctx: 1, "a")
    both.step(lambda ctx: 2, "b")
    async with serving(both) as programs:
        assert (await programs.run("both")).output == {"a": 1, "b": 2}


async def test_graph_that_collects_failures_fails_if_no_last_step_has_a_result() -> None:
    made = Graph("lenient", settle="collect")
    made.step(lambda ctx: 1 / 0, "a")
    made.step(lambda ctx: ctx.input, "b", depends_on=["a"])
    async with serving(made) as programs:
        run = await programs.run("lenient")
    assert run.status == "failed"
    assert "graph 'lenient' has no result: step 'a' failed with division by zero" in str(run.error)


async def test_agent_emits_its_text_and_its_model_calls() -> None:
    agent = Agent(ScriptedModel(["a long answer in pieces"]), name="helper")
    async with serving(agent) as programs:
        run = await programs.run("helper", "hi")
        pieces = [event.data["text"] for event in await programs.events(run, "text.delta")]
        (call,) = [event for event in await programs.events(run, "call.ended") if event.data["kind"] != "system"]
    assert run.output == "".join(pieces) == "a long answer in pieces"
    assert (call.data["kind"], call.data["status"]) == ("llm", "success")


async def test_only_the_text_of_the_last_step_of_a_graph_is_the_answer() -> None:
    made = Graph("two")
    made.step(Agent(ScriptedModel(["a draft"]), name="writer"), "draft")
    made.step(Agent(ScriptedModel(["the answer"]), name="editor"), "edit", depends_on=["draft"])
    async with serving(made) as programs:
        run = await programs.run("two", "write")
        answer = "".join(event.data["text"] for event in await programs.events(run, "text.delta"))
        inside = [event.data["data"] for event in await programs.events(run, "node.progress")]
    assert (run.output, answer) == ("the answer", "the answer")
    assert [(one["node"], one["data"]["text"]) for one in inside if one["event"] == "delta"] == [("draft", "a draft")]


async def test_agent_that_answers_in_a_type_of_its_own_gives_json() -> None:
    class Person(BaseModel):
        name: str

    agent = Agent(ScriptedModel(['[{"name": "Ann"}]']), output=list[Person], name="people")
    async with serving(agent) as programs:
        assert (await programs.run("people")).output == [{"name": "Ann"}]


async def test_agent_gets_the_history_of_a_chat_and_a_graph_the_message() -> None:
    histories = Histories()
    echo = Graph("echo")
    echo.step(lambda ctx: f"you wrote {ctx.input}", "say")
    async with serving(Agent(histories.model, name="helper"), echo) as programs:
        first = await programs.chats.stream_agent_chat("helper", "one", owner=ANN)
        await first.result()
        second = await programs.chats.stream_chat(first.chat_id, "two", owner=ANN)
        assert (await second.result()).content == "answer 2"
        turn = await programs.chats.stream_agent_chat("echo", "three", owner=ANN)
        assert (await turn.result()).content == "you wrote three"
    assert histories.requests[1] == [("user", "one"), ("assistant", "answer 1"), ("user", "two")]


async def test_tool_of_a_served_agent_asks_for_approval_like_that_of_an_agent_node() -> None:
    done: list[str] = []

    def delete(what: str) -> None:
        done.append(what)

    def cleaner(what: str) -> Agent:
        model = ScriptedModel([ToolCall("1", "delete", {"what": what}), "gone"])
        return Agent(model, tools=[Tool(delete, needs_approval=True)], name="cleaner")

    agent, inner = cleaner("x"), Graph("around")
    inner.step(cleaner("y"), "clean")
    async with serving(agent, inner) as programs:
        for name in ("cleaner", "around"):
            run = await programs.host.submit(owner=ANN, graph_id=name)
            async for event in programs.host.events(run.id):
                if event.type == "approval.requested":
                    await programs.host.answer(event.data["approval"]["id"], "approved", by=ANN)
            assert (await programs.host.wait(run.id)).output == "gone"
    assert done == ["x", "y"]


async def test_a_json_graph_can_run_a_program_between_other_nodes() -> None:
    shout = Graph("shout")
    shout.step(lambda ctx: ctx.input.upper(), "up")
    around = document(
        [node("in", "input"), node("p", "program", program="shout"), node("t", "prompt-template", template="{{x}}!")],
        ["in > p", "p > t.x"],
    )
    async with serving(shout) as programs:
        await programs.stores.graphs.save("around", ANN, "around", around, now_ms=1)
        assert (await programs.run("around", "hey")).output == "HEY!"


async def test_program_that_is_not_served_fails_the_run_with_what_to_do_and_resumes_once_it_is() -> None:
    ran: list[str] = []
    async with serving(counting("a", "b", ran=ran)) as programs:
        program = programs.served.pop("chain")
        run = await programs.run("chain", "in")
        assert run.status == "failed"
        assert "program 'chain' is not served here; start penstock serve with it" in str(run.error)
        programs.served["chain"] = program
        assert (await programs.resume(run)).output == "in>a>b"
    assert ran == ["a", "b"]


# Programs that change.


def test_fingerprint_covers_steps_edges_policies_models_tools_and_schemas_and_not_code() -> None:
    def one(ctx: ExecutionContext) -> int:
        return 1

    def other(ctx: ExecutionContext) -> int:
        return 2

    def made(fn: Any = one, id: str = "a", after: list[str] | None = None, policy: ErrorPolicy | None = None) -> str:
        graph = Graph("g")
        graph.step(one, "first")
        graph.step(fn, id, depends_on=after or [], error_policy=policy)
        return fingerprint_of(structure_of(graph))

    def add(x: int) -> int:
        return x

    def add_text(x: str) -> str:
        return x

    def agent(model: str = "m", tools: Any = (), output: Any = None, text: str = "be brief") -> str:
        return fingerprint_of(structure_of(Agent(ScriptedModel([], name=model), text, tools, output=output)))

    add_text.__name__ = "add"
    other.__name__ = "one"
    assert made() == made(fn=other)
    assert len({made(), made(id="b"), made(after=["first"]), made(policy=ErrorPolicy("retry", 2))}) == 4
    variants = [agent(), agent("n"), agent(tools=[add]), agent(tools=[add_text]), agent(output=int), agent(text="x")]
    assert len(set(variants)) == len(variants)


async def test_changed_program_reuses_matching_steps_runs_changed_ones_and_lists_both() -> None:
    ran: list[str] = []
    async with serving(counting("a", "b", "c", "end", ran=ran, broken="end")) as programs:
        run = await programs.run("chain", "in")
        assert (run.status, ran) == ("failed", ["a", "b", "c", "end"])
        ran.clear()
        # `b` is gone, `c` follows `a` directly, and `end` no longer fails.
        await programs.serve(counting("a", "c", "new", "end", ran=ran))
        run = await programs.resume(run)
        assert (run.status, run.output) == ("completed", "in>a>c>new>end")
        (changed,) = await programs.events(run, "program.changed")
    assert ran == ["c", "new", "end"]
    assert changed.data["reused"] == ["a"]
    assert changed.data["again"] == [{"name": "c", "why": "it waits for a, and waited for b"}]
    assert changed.data["ignored"] == [{"name": "b", "why": "there is no such step any more"}]
    assert "program 'chain' has changed since this run was submitted" in changed.data["message"]


async def test_steps_recorded_by_a_changed_program_are_found_again_and_never_mixed_with_others() -> None:
    ran: list[str] = []
    async with serving(counting("a", "b", "end", ran=ran, broken="end")) as programs:
        run = await programs.run("chain", "in")
        await programs.serve(counting("a", "x", "b", "end", ran=ran, broken="end"))
        run = await programs.resume(run)
        ran.clear()
        run = await programs.resume(run)
        assert (run.status, ran) == ("failed", ["end"])  # x and b of the changed program are recorded
        await programs.serve(counting("a", "y", "b", "end", ran=ran, broken="end"))
        run = await programs.resume(run)
        assert ran == ["end", "y", "b", "end"]
        (*_, changed) = await programs.events(run, "program.changed")
        ran.clear()
        await programs.serve(counting("a", "b", "end", ran=ran))
        run = await programs.resume(run)
        assert (run.output, ran) == ("in>a>b>end", ["end"])  # the first program again, with its own results
    assert [one["name"].partition("@")[0] for one in changed.data["ignored"]] == ["x", "b"]


async def test_step_after_a_changed_one_runs_again() -> None:
    ran: list[str] = []
    async with serving(counting("a", "b", "c", "end", ran=ran, broken="end")) as programs:
        run = await programs.run("chain", "in")
        ran.clear()
        await programs.serve(counting("z", "a", "b", "c", "end", ran=ran))
        run = await programs.resume(run)
        (changed,) = await programs.events(run, "program.changed")
    assert (run.output, ran) == ("in>z>a>b>c>end", ["z", "a", "b", "c", "end"])
    assert {one["name"]: one["why"] for one in changed.data["again"]} == {
        "a": "it waits for z, and waited for nothing",
        "b": "a step before it has changed",
        "c": "a step before it has changed",
    }


async def test_changed_agent_reuses_its_answers_unless_its_model_changed() -> None:
    calls: list[str] = []

    def look(what: str) -> str:
        """Look something up."""
        calls.append(what)
        return f"{what} is 7"

    def agent(*replies: Any, text: str = "be brief", model: str = "first") -> Agent:
        return Agent(ScriptedModel(replies, name=model), text, [look], name="helper")

    call = ToolCall("1", "look", {"what": "x"})
    async with serving(agent(call, ValueError("down"))) as programs:
        run = await programs.run("helper", "x?")
        assert (run.status, calls) == ("failed", ["x"])
        await programs.serve(agent("it is 7", text="be very brief"))
        run = await programs.resume(run)
        assert (run.output, calls) == ("it is 7", ["x"])
        (changed,) = await programs.events(run, "program.changed")
        assert len(changed.data["reused"]) == 2
        run = await programs.run("helper", "x?")  # of the changed agent, whose script is at its end
        assert run.status == "failed"
        await programs.serve(agent("who knows", model="second"))
        run = await programs.resume(run)
    assert run.output == "who knows"


async def test_agent_with_another_model_lists_the_answers_that_it_does_not_use() -> None:
    def agent(*replies: Any, model: str) -> Agent:
        return Agent(ScriptedModel(replies, name=model), tools=[len_of], name="helper")

    def len_of(text: str) -> int:
        return len(text)

    async with serving(agent(ToolCall("1", "len_of", {"text": "x"}), ValueError("down"), model="first")) as programs:
        run = await programs.run("helper", "x?")
        await programs.serve(agent("one", model="second"))
        run = await programs.resume(run)
        (changed,) = await programs.events(run, "program.changed")
    assert (run.output, changed.data["reused"]) == ("one", [])
    assert {one["why"] for one in changed.data["ignored"]} == {
        "the model of the agent was first and is second now",
    }
    assert len(changed.data["ignored"]) == 2


async def test_program_that_became_an_agent_uses_nothing_of_the_graph() -> None:
    ran: list[str] = []
    async with serving(counting("a", "b", ran=ran, broken="b")) as programs:
        run = await programs.run("chain", "in")
        await programs.serve(Agent(ScriptedModel(["anew"]), name="chain"))
        run = await programs.resume(run)
        (changed,) = await programs.events(run, "program.changed")
    assert run.output == "anew"
    assert changed.data["ignored"] == [{"name": "a", "why": "the program was a graph and is an agent now"}]


async def test_step_with_a_changed_graph_inside_or_another_input_runs_again() -> None:
    def made(ran: list[str], *inner: str, given: str, broken: bool) -> Graph:
        outer, nested = Graph("outer"), Graph("nested")
        for name in inner:
            nested.step(lambda ctx, name=name: ran.append(name) or name, name)
        outer.step(nested, "nested")
        outer.step(lambda ctx: ran.append("given") or ctx.input, "given", input=given)
        outer.step(lambda ctx: ran.append("kept") or 1, "kept")
        outer.step(lambda ctx: 1 / 0 if broken else ctx.input, "end", depends_on=["nested", "given", "kept"])
        return outer

    ran: list[str] = []
    async with serving(made(ran, "x", given="one", broken=True)) as programs:
        run = await programs.run("outer")
        ran.clear()
        await programs.serve(made(ran, "x", "y", given="two", broken=False))
        run = await programs.resume(run)
        (changed,) = await programs.events(run, "program.changed")
    assert run.output == {"nested": {"x": "x", "y": "y"}, "given": "two", "kept": 1}
    assert sorted(ran) == ["given", "x", "y"]
    assert {one["name"]: one["why"] for one in changed.data["again"]} == {
        "nested": "the graph in it has changed",
        "given": "its input has changed",
    }


async def test_retries_of_a_changed_step_are_recorded_under_its_new_name() -> None:
    attempts: list[str] = []

    def made(*names: str, failures: int, broken: bool) -> Graph:
        graph = Graph("retrying")

        def flaky(ctx: ExecutionContext) -> str:
            attempts.append("flaky")
            if len(attempts) <= failures:
                raise ValueError("not yet")
            return "done"

        for name in names:
            graph.step(lambda ctx: 1, name)
        retry = ErrorPolicy("retry", 2, retry_delay_ms=0)  # all three attempts are needed below
        graph.step(flaky, "flaky", depends_on=list(names), error_policy=retry)
        graph.step(lambda ctx: 1 / 0 if broken else ctx.input, "end", depends_on=["flaky"])
        return graph

    async with serving(made("a", failures=1, broken=True)) as programs:
        run = await programs.run("retrying")
        assert len(attempts) == 2
        attempts.clear()
        await programs.serve(made("a", "b", failures=2, broken=True))
        run = await programs.resume(run)
        assert len(attempts) == 3
        attempts.clear()
        await programs.serve(made("a", "b", failures=9, broken=False))
        run = await programs.resume(run)
    assert (run.output, attempts) == ("done", [])
