"""What does it cost that runs survive, and that they are served?

Each question has its baseline in the same run: a graph without a journal and a bare INSERT in a thread; the same rows
in one `executemany`; a bare FastAPI app behind the same server. Wall time, because most of it is waiting for a thread,
a file or a socket; CPU time where it is asked whether something grows.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks._report import Cell, Table, main
from benchmarks._rounds import Contestant, expect, measure, play

NODES = 1_000
EVENTS = 20_000
BATCH = 20
TIME_LIMIT_S = 300.0


# A chain of nodes that do nothing, with and without a journal.


class Pass:
    """An executor that hands on what came."""

    def execute(self, data: Any, inputs: Any, context: Any) -> Any:
        from penstock.kernel.executor import ExecutionResult
        from penstock.kernel.values import DataValue

        return ExecutionResult({"output": inputs.get("input") or DataValue("number", 1)})


def chain(nodes: int) -> dict[str, Any]:
    """A graph of that many nodes in a row."""
    return {
        "id": "chain",
        "nodes": [{"id": f"n{at}", "type": "pass", "position": {"x": 0, "y": at}, "data": {}} for at in range(nodes)],
        "edges": [
            {
                "id": f"e{at}",
                "source": f"n{at}",
                "sourceHandle": "output",
                "target": f"n{at + 1}",
                "targetHandle": "input",
                "data": {"channel": "flow"},
            }
            for at in range(nodes - 1)
        ],
    }


async def run_chain(nodes: int, journal: Any = None) -> tuple[float, int]:
    """Wall µs per node of one run, and how many nodes completed."""
    from penstock.runtime.context import ExecutionContext
    from penstock.runtime.graphs.graph_runtime import GraphRuntime, run_flow

    context = ExecutionContext(journal=journal)
    runtime = GraphRuntime(chain(nodes), run_id=context.run_id, executors={"pass": Pass()})
    completed = 0
    started = time.perf_counter()
    async with aclosing(run_flow(runtime, context)) as events:
        async for event in events:
            completed += getattr(event, "event_type", "") == "completed"
    took = time.perf_counter() - started
    context.end()
    return took / nodes * 1e6, completed


@asynccontextmanager
async def journals(kind: str) -> AsyncIterator[Any]:
    """Where a journal of that kind is kept; None for none."""
    from penstock.storage import open_stores

    if not kind:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        url = "memory:" if kind == "memory" else f"sqlite:///{folder}/runs.db"
        async with await open_stores(url) as stores:
            yield stores.journal


def time_journal(kind: str, nodes: int, reps: int) -> dict[str, Any]:
    """Wall µs per node of a chain whose journal is kept in `kind`: "" is none, "floor" is one INSERT for each node."""

    async def timed() -> list[float]:
        from penstock.runtime.durable.journal import Journal

        taken = []
        async with journals(kind) as store:
            for rep in range(reps + 1):
                journal = None if store is None else await Journal.open(store, f"run-{rep}")
                per_node, completed = await run_chain(nodes, journal)
                expect("nodes", completed, nodes)
                expect("entries", 0 if journal is None else journal.recorded, 0 if journal is None else nodes)
                taken.append(per_node)
        return taken[1:]

    return {"wall_us": time_inserts(nodes, reps) if kind == "floor" else asyncio.run(timed())}


def time_inserts(nodes: int, reps: int) -> list[float]:
    """Wall µs of an INSERT with its COMMIT, awaited from an event loop, in SQLite's write-ahead log."""

    async def timed(connection: sqlite3.Connection, pool: ThreadPoolExecutor) -> float:
        loop = asyncio.get_running_loop()
        started = time.perf_counter()
        for at in range(nodes):
            await loop.run_in_executor(pool, connection.execute, "INSERT INTO journal VALUES (?, ?)", (at, "{}"))
        return (time.perf_counter() - started) / nodes * 1e6

    taken = []
    for _ in range(reps):
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
            connection = sqlite3.connect(Path(folder) / "floor.db", isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("CREATE TABLE journal (key INTEGER PRIMARY KEY, value TEXT)")
            taken.append(asyncio.run(timed(connection, pool)))
            connection.close()
    return taken


def time_resume(kind: str, nodes: int, reps: int) -> dict[str, Any]:
    """Wall µs per node to load a journal that lacks the last node, find all the others, and run that one."""

    async def timed() -> list[float]:
        from penstock.runtime.durable.journal import Journal, fork_journal

        taken = []
        async with journals(kind) as store:
            whole = await Journal.open(store, "whole")
            await run_chain(nodes, whole)
            for rep in range(reps):
                await fork_journal(store, "whole", f"run-{rep}", without=lambda entry: entry.key == f"n{nodes - 1}")
                started = time.perf_counter()
                journal = await Journal.open(store, f"run-{rep}")
                _, completed = await run_chain(nodes, journal)
                taken.append((time.perf_counter() - started) / nodes * 1e6)
                expect("nodes", completed, nodes)
                expect("entries", (journal.replayed, journal.recorded), (nodes - 1, 1))
        return taken

    return {"wall_us": asyncio.run(timed())}


# Events.


def time_events(kind: str, events: int, reps: int) -> dict[str, Any]:
    """Events a second, in batches of BATCH, through the event store; "floor" is executemany of the same rows."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "floor":
            return {"per_s": [_insert_many(Path(folder) / f"{rep}.db", events) for rep in range(reps)]}
        return {"per_s": asyncio.run(_append_all(f"sqlite:///{folder}/runs.db", events, reps))}


def _insert_many(path: Path, events: int) -> float:
    rows = [("run", seq, 0, "text.delta", json.dumps({"text": f"word {seq}"})) for seq in range(1, events + 1)]
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("CREATE TABLE events (run TEXT, seq INTEGER, at INTEGER, type TEXT, data TEXT)")
    started = time.perf_counter()
    for at in range(0, events, BATCH):
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", rows[at : at + BATCH])
        connection.execute("COMMIT")
    taken = time.perf_counter() - started
    connection.close()
    return events / taken


async def _append_all(url: str, events: int, reps: int) -> list[float]:
    from penstock.hosting.records import HostedEvent, RunRecord
    from penstock.storage import open_stores

    rates = []
    async with await open_stores(url) as stores:
        for rep in range(reps):
            run = await stores.runs.add(RunRecord(f"run-{rep}", "bench", "chain", 1))
            told = [HostedEvent(seq, 0, "text.delta", {"text": f"word {seq}"}) for seq in range(1, events + 1)]
            started = time.perf_counter()
            for at in range(0, events, BATCH):
                await stores.events.append(run.id, run.epoch, told[at : at + BATCH])
            rates.append(events / (time.perf_counter() - started))
            expect("events", await stores.events.last_seq(run.id), events)
    return rates


# The budget that processes share.


def time_shared(kind: str, calls: int, reps: int) -> dict[str, Any]:
    """Wall µs of an async call under a budget of its own, and under one in a store as well."""
    from penstock.containment.ledger import MemoryLedgerStore
    from penstock.containment.limits import Limits
    from penstock.runtime.context import ExecutionContext
    from penstock.runtime.durable.shared import SharedBudget
    from penstock.storage.sqlite_ledger import SqliteLedgerStore

    async def work() -> None:
        return None

    async def timed(shared: Any) -> float:
        async with ExecutionContext(shared_budget=shared) as context:
            started = time.perf_counter()
            for _ in range(calls):
                await context.atool(work, name="work", cost_hint_usd=0.000001)
            return (time.perf_counter() - started) / calls * 1e6

    taken = []
    for rep in range(reps):
        with tempfile.TemporaryDirectory() as folder:
            store: Any = None
            if kind:
                store = SqliteLedgerStore(f"{folder}/ledger") if kind == "sqlite" else MemoryLedgerStore()
                store.open_account("run:bench", Limits())
            shared = None if store is None else SharedBudget(store, "run:bench", prefix=f"bench/{rep}")
            taken.append(asyncio.run(timed(shared)))
            if kind == "sqlite":
                store.close()
    return {"wall_us": taken}


# Requests.


def graph_that_answers() -> dict[str, Any]:
    """A chat with one agent, whose model answers at once."""
    return {
        "id": "echo",
        "nodes": [
            {"id": "start", "type": "chat-start", "position": {"x": 0, "y": 0}, "data": {}},
            {
                "id": "agent",
                "type": "agent",
                "position": {"x": 1, "y": 0},
                "data": {"model": "echo", "stream": True},
            },
        ],
        "edges": [
            {
                "id": "e",
                "source": "start",
                "sourceHandle": "output",
                "target": "agent",
                "targetHandle": "input",
                "data": {"channel": "flow"},
            }
        ],
    }


@asynccontextmanager
async def _penstock_host(url: str) -> AsyncIterator[Any]:
    from penstock.agents.scripted import ScriptedModel
    from penstock.hosting.host import HostSettings, RunHost
    from penstock.storage import open_stores

    answering = ScriptedModel(lambda request: "An answer of some ten words, as short as they come.", name="echo")
    async with await open_stores(url) as stores:
        settings = HostSettings(max_running_per_owner=64)
        async with RunHost(stores, services={"models": {"echo": answering}}, settings=settings) as host:
            await stores.graphs.save("echo", "bench", "echo", graph_that_answers(), now_ms=0)
            yield host


async def _penstock_app(url: str, ready: Callable[[Any], Any]) -> None:
    from penstock.chat.service import ChatService
    from penstock.server.app import create_app

    async with _penstock_host(url) as host:
        await ready(create_app(host, ChatService(host, host.stores.chats), host.stores))


async def _bare_app(url: str, ready: Callable[[Any], Any]) -> None:
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse

    app = FastAPI()
    answer = {"object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": "…"}}]}

    @app.post("/v1/chat/completions")
    async def complete(asked: dict[str, Any]) -> Any:
        if not asked.get("stream"):
            return answer

        async def pieces() -> AsyncIterator[str]:
            yield f"data: {json.dumps(answer)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    await ready(app)


@contextmanager
def serving(kind: str) -> Iterator[str]:
    """The address of a server, on a loop in a thread of its own."""
    import uvicorn

    started, address = threading.Event(), []
    servers: list[uvicorn.Server] = []

    async def ready(app: Any) -> None:
        config = uvicorn.Config(app, host="127.0.0.1", port=0, http="h11", log_level="error", access_log=False)
        server = uvicorn.Server(config)
        servers.append(server)
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  # it says so nowhere else
            await asyncio.sleep(0.01)
        address.append(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
        started.set()
        await serving

    with tempfile.TemporaryDirectory() as folder:
        make = _bare_app if kind == "bare" else _penstock_app
        url = "memory:" if kind == "memory" else f"sqlite:///{folder}/runs.db"
        thread = threading.Thread(target=lambda: asyncio.run(make(url, ready)))
        thread.start()
        started.wait(60)
        try:
            yield address[0]
        finally:
            servers[0].should_exit = True
            thread.join(30)


def time_requests(kind: str, requests: int, clients: int, stream: bool) -> dict[str, Any]:
    """Requests a second and ms a request; the clients are in a process of their own."""
    import subprocess
    import sys

    with serving(kind) as url:
        asked = json.dumps({"url": url, "requests": requests, "clients": clients, "stream": stream})
        done = subprocess.run(
            [sys.executable, "-c", f"from benchmarks.service import ask_all; ask_all({asked!r})"],
            capture_output=True,
            text=True,
            check=True,
        )
    told = json.loads(done.stdout.splitlines()[-1])
    return {"per_s": [told["per_s"]], "p50_ms": [told["p50_ms"]], "p95_ms": [told["p95_ms"]]}


def ask_all(asked: str) -> None:
    """What a client process does: so many requests from so many threads, and prints how long they took."""
    import httpx2

    told = json.loads(asked)
    each = told["requests"] // told["clients"]
    taken: list[float] = []

    def client() -> None:
        body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "stream": told["stream"]}
        with httpx2.Client(base_url=told["url"], timeout=60, trust_env=False) as http:
            for _ in range(each):
                started = time.perf_counter()
                response = http.post("/v1/chat/completions", json=body)
                taken.append(time.perf_counter() - started)
                expect("status", response.status_code, 200)
                expect("end", "[DONE]" in response.text, told["stream"])

    threads = [threading.Thread(target=client) for _ in range(told["clients"])]
    begun = time.perf_counter()
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    elapsed = time.perf_counter() - begun
    expect("answers", len(taken), each * told["clients"])
    p95 = statistics.quantiles(taken, n=20)[-1]
    print(
        json.dumps({"per_s": len(taken) / elapsed, "p50_ms": statistics.median(taken) * 1_000, "p95_ms": p95 * 1_000})
    )


# Turns of a chat.


def time_turns(kind: str, turns: int) -> dict[str, Any]:
    """CPU ms of a turn of a chat, early and late in it: the least of the ten first and of the ten last."""

    async def timed(url: str) -> list[float]:
        from penstock.chat.service import ChatService

        taken = []
        async with _penstock_host(url) as host:
            service = ChatService(host, host.stores.chats)
            chat = await service.create_chat(owner="bench", graph_id="echo")
            for _ in range(turns + 1):
                started = time.process_time()
                turn = await service.stream_chat(chat.id, "Some ten words that somebody says in a chat.", owner="bench")
                ends = [event.type async for event in turn.events()][-1]
                taken.append((time.process_time() - started) * 1_000)
                expect("end", ends, "run.completed")
        return taken[1:]

    with tempfile.TemporaryDirectory() as folder:
        taken = asyncio.run(timed("memory:" if kind == "memory" else f"sqlite:///{folder}/runs.db"))
    return {"early_ms": [min(taken[:10])], "late_ms": [min(taken[-10:])]}


# The questions.


def _ask_journal(quick: bool) -> Table:
    rows = [("no journal", ""), ("in memory", "memory"), ("SQLite", "sqlite"), ("an INSERT in a thread", "floor")]
    contestants = [Contestant(label, kind) for label, kind in rows]
    nodes, reps, rounds = (200, 2, 1) if quick else (NODES, 3, 5)
    play(
        contestants,
        rounds,
        lambda each: measure(
            each, "benchmarks.service", "time_journal", TIME_LIMIT_S, kind=each.name, nodes=nodes, reps=reps
        ),
    )
    found = Contestant("SQLite, resumed: found, not run", "sqlite")
    play(
        [found],
        rounds,
        lambda each: measure(
            each, "benchmarks.service", "time_resume", TIME_LIMIT_S, kind="sqlite", nodes=nodes, reps=reps
        ),
    )
    none = contestants[0]
    return Table(
        f"What does a journal cost a node, and a resume? ({nodes:,} nodes in a row)",
        f"Wall µs per node, the minimum of {rounds} shuffled rounds of {reps}.",
        ("journal", "µs", "beyond none"),
        [(each.label, _least(each, "wall_us"), _beyond(each, none)) for each in (*contestants, found)],
        raw={each.label: each.figures("wall_us") for each in (*contestants, found)},
    )


def _ask_events(quick: bool) -> Table:
    contestants = [Contestant("event store, SQLite", "store"), Contestant("executemany, SQLite", "floor")]
    events, reps, rounds = (2_000, 1, 1) if quick else (EVENTS, 2, 3)
    play(
        contestants,
        rounds,
        lambda each: measure(
            each, "benchmarks.service", "time_events", TIME_LIMIT_S, kind=each.name, events=events, reps=reps
        ),
    )
    ours, floor = (_most(each, "per_s") for each in contestants)
    ratio = ours / floor if isinstance(ours, float) and isinstance(floor, float) else None
    return Table(
        "How many events are stored in a second?",
        f"Events a second in batches of {BATCH}, each batch committed; the best of {rounds} shuffled rounds.",
        ("", "events/s", "× executemany"),
        [("event store, SQLite", ours, ratio), ("executemany, SQLite", floor, 1.0)],
        raw={each.label: each.figures("per_s") for each in contestants},
    )


def _ask_shared(quick: bool) -> Table:
    contestants = [
        Contestant("a run's own budget", ""),
        Contestant("and one in memory", "memory"),
        Contestant("and one in SQLite", "sqlite"),
    ]
    calls, reps, rounds = (200, 1, 1) if quick else (1_000, 3, 3)
    play(
        contestants,
        rounds,
        lambda each: measure(
            each, "benchmarks.service", "time_shared", TIME_LIMIT_S, kind=each.name, calls=calls, reps=reps
        ),
    )
    none = contestants[0]
    return Table(
        "What does a budget cost that processes share?",
        f"Wall µs of an async call, the minimum of {rounds} shuffled rounds of {reps}.",
        ("budget", "µs", "beyond the run's own"),
        [(each.label, _least(each, "wall_us"), _beyond(each, none)) for each in contestants],
        raw={each.label: each.figures("wall_us") for each in contestants},
    )


def _ask_turns(quick: bool) -> Table:
    contestants = [Contestant("in memory", "memory"), Contestant("SQLite", "sqlite")]
    turns, rounds = (60, 1) if quick else (300, 3)
    play(
        contestants,
        rounds,
        lambda each: measure(each, "benchmarks.service", "time_turns", TIME_LIMIT_S, kind=each.name, turns=turns),
    )
    return Table(
        f"What does a turn of a chat cost, and does it grow? ({turns} turns)",
        f"CPU ms of a turn with one agent whose model answers at once, the minimum of {rounds} shuffled rounds. The "
        "model is told everything that was said before.",
        ("stores", "the first ten", "the last ten"),
        [(each.label, _least(each, "early_ms"), _least(each, "late_ms")) for each in contestants],
        raw={each.label: each.results for each in contestants},
    )


def _ask_requests(quick: bool) -> Table:
    requests, rounds = (64, 1) if quick else (400, 3)
    cases = [(clients, stream) for clients in (1, 8) for stream in (False, True)]
    kinds = [("bare FastAPI", "bare"), ("penstock, in memory", "memory"), ("penstock, SQLite", "sqlite")]
    contestants = [
        Contestant(f"{label}, {clients} client{'s' * (clients > 1)}{', streamed' * stream}", kind, None, {"case": at})
        for at, (clients, stream) in enumerate(cases)
        for label, kind in kinds
    ]

    def once(each: Contestant) -> None:
        clients, stream = cases[int(str(each.settings["case"]))]
        about = {"kind": each.name, "requests": requests, "clients": clients, "stream": stream}
        measure(each, "benchmarks.service", "time_requests", TIME_LIMIT_S, **about)

    play(contestants, rounds, once)
    bare = {each.settings["case"]: each for each in contestants if each.name == "bare"}
    return Table(
        "What does OpenAI's endpoint add to a bare one?",
        f"POST /v1/chat/completions, a chat with one agent whose model answers at once; {requests} requests, the best "
        f"of {rounds} shuffled rounds. A run is stored, journalled, budgeted and traced; the bare app has a constant.",
        ("", "requests/s", "p50 ms", "p95 ms", "p50 ms beyond bare"),
        [
            (
                each.label,
                _most(each, "per_s"),
                _least(each, "p50_ms"),
                _least(each, "p95_ms"),
                _beyond(each, bare[each.settings["case"]], "p50_ms"),
            )
            for each in contestants
        ],
        raw={each.label: each.results for each in contestants},
    )


def _least(each: Contestant, figure: str) -> Cell:
    return each.trouble or min(each.figures(figure))


def _most(each: Contestant, figure: str) -> Cell:
    return each.trouble or max(each.figures(figure))


def _beyond(each: Contestant, other: Contestant, figure: str = "wall_us") -> Cell:
    if each is other or each.trouble or other.trouble or each.name == "floor":
        return None
    return max(0.0, min(each.figures(figure)) - min(other.figures(figure)))


def ask(quick: bool) -> list[Table]:
    """Journal, events, shared budgets, turns, requests."""
    return [_ask_journal(quick), _ask_events(quick), _ask_shared(quick), _ask_turns(quick), _ask_requests(quick)]


if __name__ == "__main__":
    main(ask)
