"""What does a turn of an agent cost beside its model and its tool?

A turn is one answer of a model that asks for one tool, and the tool; both take no time, so that everything measured is
the framework's own. Two lengths of conversation show who reads all of it in every turn.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks._peers import load
from benchmarks._report import Cell, Table, main
from benchmarks._rounds import Contestant, expect, least_and_median, measure, play, versions

TURNS = (50, 500)
TIME_LIMIT_S = 120.0

Run = Callable[[], Awaitable[tuple[str, int]]]
"""One run of an agent: its answer, and how often the tool was called."""


class Script:
    """The model's side, the same for everybody: so many calls of a tool, then an answer."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.turn = 0
        self.calls = 0

    def begin(self) -> None:
        self.turn = self.calls = 0

    def next(self) -> int | None:
        """What the tool is called with; None for the answer."""
        at = self.turn
        self.turn = at + 1
        return at if at < self.turns else None

    async def inc(self, x: int) -> int:
        """Increment x."""
        self.calls += 1
        return x + 1


def floor(script: Script) -> Run:
    """What is left when nothing but the model, the tool and a list of messages is there."""

    async def model(messages: list[tuple[str, Any]]) -> tuple[str, dict[str, int]] | str:
        x = script.next()
        return "done" if x is None else ("inc", {"x": x})

    tools = {"inc": script.inc}

    async def run() -> tuple[str, int]:
        script.begin()
        messages: list[tuple[str, Any]] = [("user", "go")]
        while True:
            answer = await model(messages)
            if isinstance(answer, str):
                return answer, script.calls
            name, arguments = answer
            value = await tools[name](**arguments)
            messages += [("assistant", answer), ("tool", str(value))]

    return run


def penstock(script: Script, limits: bool) -> Run:
    """An agent of ours; with `limits`, under every limit but a deadline, at two levels, and with prices."""
    from penstock import Budget, ExecutionContext, Price, PriceBook, Usage
    from penstock.agents.agent import Agent
    from penstock.agents.messages import ToolCall
    from penstock.agents.model import ModelRequest, ModelResponse
    from penstock.agents.scripted import ScriptedModel
    from penstock.agents.tools import Tool

    usage = Usage(10, 5)

    def answer(request: ModelRequest) -> ModelResponse:
        x = script.next()
        if x is None:
            return ModelResponse("done", (), usage)
        return ModelResponse("", (ToolCall(f"c{x}", "inc", {"x": x}),), usage, "tool_calls")

    budget = Budget(max_cost_dollars=100, max_tokens=10**9, max_steps=10**6, max_api_calls=10**6) if limits else None
    prices = PriceBook(registered={"scripted": Price(1, 2)}, use_genai_prices=False)
    agent = Agent(ScriptedModel(answer), tools=[Tool(script.inc)], budget=budget, max_iterations=script.turns + 1)

    async def run() -> tuple[str, int]:
        script.begin()
        with ExecutionContext(budget=budget, prices=prices) as context:
            result = await agent.run("go", context)
        expect("model calls on the books", context.balance.api_calls, script.turns + 1)
        return result.output, script.calls

    return run


def agno(script: Script) -> Run:
    os.environ["AGNO_TELEMETRY"] = "false"
    base: Any = load("agno.models.base").Model
    response: Any = load("agno.models.response").ModelResponse

    class Fake(base):  # type: ignore[misc]
        def answer(self) -> Any:
            x = script.next()
            if x is None:
                return response(role="assistant", content="done")
            function = {"name": "inc", "arguments": json.dumps({"x": x})}
            return response(role="assistant", tool_calls=[{"id": f"c{x}", "type": "function", "function": function}])

        def invoke(self, *args: Any, **options: Any) -> Any:
            return self.answer()

        async def ainvoke(self, *args: Any, **options: Any) -> Any:
            return self.answer()

        def invoke_stream(self, *args: Any, **options: Any) -> Any:
            yield self.answer()

        async def ainvoke_stream(self, *args: Any, **options: Any) -> Any:
            yield self.answer()

        def _parse_provider_response(self, response: Any, **options: Any) -> Any:
            return response

        def _parse_provider_response_delta(self, response: Any) -> Any:
            return response

    async def inc(x: int) -> int:
        """Increment x."""
        return await script.inc(x)

    agent = load("agno.agent").Agent(model=Fake(id="fake"), tools=[inc], telemetry=False)

    async def run() -> tuple[str, int]:
        script.begin()
        return (await agent.arun("go")).content, script.calls

    return run


def pydantic_ai(script: Script) -> Run:
    framework: Any = load("pydantic_ai")

    async def answer(messages: Any, info: Any) -> Any:
        x = script.next()
        if x is None:
            return framework.ModelResponse(parts=[framework.TextPart("done")])
        return framework.ModelResponse(parts=[framework.ToolCallPart("inc", {"x": x}, tool_call_id=f"c{x}")])

    async def inc(x: int) -> int:
        """Increment x."""
        return await script.inc(x)

    agent = framework.Agent(load("pydantic_ai.models.function").FunctionModel(answer), tools=[inc])
    limits = load("pydantic_ai.usage").UsageLimits(request_limit=None)

    async def run() -> tuple[str, int]:
        script.begin()
        return (await agent.run("go", usage_limits=limits)).output, script.calls

    return run


def openai_agents(script: Script) -> Run:
    framework, types = load("agents"), load("openai.types.responses")
    base: Any = framework.Model

    async def inc(x: int) -> int:
        """Increment x."""
        return await script.inc(x)

    class Fake(base):  # type: ignore[misc]
        async def get_response(self, *args: Any, **options: Any) -> Any:
            x = script.next()
            if x is None:
                text = types.ResponseOutputText.model_construct(type="output_text", text="done", annotations=[])
                output = types.ResponseOutputMessage.model_construct(
                    id="m", type="message", role="assistant", status="completed", content=[text]
                )
            else:
                output = types.ResponseFunctionToolCall.model_construct(
                    id=f"f{x}", call_id=f"c{x}", type="function_call", name="inc", arguments=json.dumps({"x": x})
                )
            usage = framework.Usage(requests=1, input_tokens=10, output_tokens=5, total_tokens=15)
            return framework.ModelResponse(output=[output], usage=usage, response_id=None)

        def stream_response(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

    agent = framework.Agent(name="a", instructions="go", model=Fake(), tools=[framework.function_tool(inc)])
    settings = framework.RunConfig(tracing_disabled=True)

    async def run() -> tuple[str, int]:
        script.begin()
        result = await framework.Runner.run(agent, "go", max_turns=script.turns + 5, run_config=settings)
        return result.final_output, script.calls

    return run


def langchain(script: Script) -> Run:
    messages, outputs = load("langchain_core.messages"), load("langchain_core.outputs")
    base: Any = load("langchain_core.language_models.chat_models").BaseChatModel

    class Fake(base):  # type: ignore[misc]
        @property
        def _llm_type(self) -> str:
            return "fake"

        def bind_tools(self, tools: Any, **options: Any) -> Any:
            return self

        def _generate(self, *args: Any, **options: Any) -> Any:
            x = script.next()
            calls = [] if x is None else [{"name": "inc", "args": {"x": x}, "id": f"c{x}", "type": "tool_call"}]
            output = messages.AIMessage(content="" if calls else "done", tool_calls=calls)
            return outputs.ChatResult(generations=[outputs.ChatGeneration(message=output)])

        async def _agenerate(self, *args: Any, **options: Any) -> Any:
            return self._generate()

    async def inc(x: int) -> int:
        """Increment x."""
        return await script.inc(x)

    agent = load("langchain.agents").create_agent(Fake(), [load("langchain_core.tools").tool(inc)])

    async def run() -> tuple[str, int]:
        script.begin()
        result = await agent.ainvoke({"messages": [("user", "go")]}, {"recursion_limit": 100_000})
        return result["messages"][-1].content, script.calls

    return run


def time_turns(contestant: str, turns: int, enough_s: float, **settings: Any) -> dict[str, Any]:
    """CPU µs per turn, all threads of the process together, of as many runs as have 500 turns; in a fresh process."""
    script, times = Script(turns), max(1, TURNS[-1] // turns)
    run: Run = globals()[contestant](script, **settings)

    async def timed() -> list[float]:
        figures: list[float] = []
        expect("answer and calls", await run(), ("done", turns))
        ends = time.perf_counter() + enough_s
        while not figures or time.perf_counter() < ends:
            gc.collect()
            started = time.process_time()
            found = [await run() for _ in range(times)]
            figures.append((time.process_time() - started) / times / turns * 1e6)
            expect("answers and calls", found, [("done", turns)] * times)
        return figures

    return {"cpu_us": asyncio.run(timed())}


def contestants(quick: bool) -> list[Contestant]:
    """The floor, us, and peers; few of them if it has to be quick."""
    everybody = [
        Contestant("asyncio: a model, a tool, a list", "floor"),
        Contestant("penstock, every limit set", "penstock", settings={"limits": True}),
        Contestant("penstock, no limits", "penstock", settings={"limits": False}),
        Contestant("agno", "agno", "agno"),
        Contestant("LangChain create_agent", "langchain", "langchain"),
        Contestant("pydantic-ai", "pydantic_ai", "pydantic-ai"),
        Contestant("OpenAI Agents", "openai_agents", "openai-agents"),
    ]
    return [each for each in everybody if each.peer in (None, "agno")] if quick else everybody


def ask(quick: bool) -> list[Table]:
    """A turn's own cost, in a short and in a long conversation."""
    rounds, enough_s = (1, 0.3) if quick else (5, 1.0)
    rows = {turns: contestants(quick) for turns in TURNS}
    for turns, row in rows.items():

        def once(each: Contestant, turns: int = turns) -> None:
            about = {"contestant": each.name, "turns": turns, "enough_s": enough_s, **each.settings}
            measure(each, "benchmarks.agents", "time_turns", TIME_LIMIT_S, **about)

        play(row, rounds, once)
    short, long = (rows[turns] for turns in TURNS)
    return [
        Table(
            question="What does a turn of an agent cost beside its model and its tool?",
            measured=f"CPU µs per turn (an answer that asks for one tool, and the tool; neither takes time) in runs of "
            f"{TURNS[0]} and of {TURNS[1]} turns; {rounds} shuffled rounds in fresh processes.",
            columns=("", *(f"{turns} turns: {what} µs" for turns in TURNS for what in ("min", "median")), "long/short"),
            rows=[_row(one, other) for one, other in zip(short, long, strict=True)],
            versions=versions([*short, *long]),
            raw={f"{each.label}, {turns} turns": each.results for turns, row in rows.items() for each in row},
        )
    ]


def _row(short: Contestant, long: Contestant) -> tuple[Cell, ...]:
    cells: list[Cell] = [short.label]
    for each in (short, long):
        cells += [each.trouble, None] if each.trouble else least_and_median(each.figures("cpu_us"))
    troubled = short.trouble or long.trouble
    return (*cells, None if troubled else min(long.figures("cpu_us")) / min(short.figures("cpu_us")))


if __name__ == "__main__":
    main(ask)
