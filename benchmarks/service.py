"""What does it cost that runs survive, and that they are served?

Each question has its baseline in the same run: a graph without a journal and a bare INSERT in a thread; the same rows
in one `executemany`; a bare FastAPI app behind the same server; the same server without readers that stall. Wall time,
because most of it is waiting for a thread, a file or a socket; CPU time where the question is whether something grows.

Servers listen as `penstock serve` does, with its socket and its settings. Whole servers and those of others: `servers`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks._report import Cell, Table, main
from benchmarks._rounds import Contestant, expect, measure, play
from benchmarks.servers import ask_servers

NODES = 1_000
EVENTS = 20_000
BATCH = 20
STALLED = 100
LONG, LONG_LOG = 4_000, 2_000
"""Characters of an event, and events, of a run whose events no socket buffer can hold."""
TIME_LIMIT_S = 300.0


# A chain of nodes that do nothing, with and without a journal.


class Pass:
    """An executor that hands on what came."""

    def execute(self, data: Any, inputs: Any, context: Any) -> Any:
        from penstock.kernel.executor import DataValue, ExecutionResult

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
    from penstock.runtime.graphs.graph_runtime import GraphRuntime
    from penstock.runtime.graphs.node_execution import run_flow

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
    from penstock.hosting.ports import HostedEvent, RunRecord
    from penstock.storage import open_stores

    rates = []
    async with await open_stores(url) as stores:
        for rep in range(reps):
            run = (await stores.runs.add(RunRecord(f"run-{rep}", "bench", "chain", 1))).run
            log = [HostedEvent(seq, 0, "text.delta", {"text": f"word {seq}"}) for seq in range(1, events + 1)]
            started = time.perf_counter()
            for at in range(0, events, BATCH):
                await stores.events.append(run.id, run.epoch, log[at : at + BATCH])
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
    from penstock.storage.sqlite.ledger import SqliteLedgerStore

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


async def _penstock_server(url: str, ready: Callable[[Any], Any]) -> None:
    from penstock.chat.service import ChatService
    from penstock.server.app import create_app
    from penstock.server.serve import ServerProcess

    async with _penstock_host(url) as host:
        await ready(ServerProcess(create_app(host, ChatService(host, host.stores.chats), host.stores)))


async def _bare_server(url: str, ready: Callable[[Any], Any]) -> None:
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse

    from penstock.server.serve import configured

    app = FastAPI()
    answer = {"object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": "…"}}]}

    @app.post("/v1/chat/completions")
    async def complete(body: dict[str, Any]) -> Any:
        if not body.get("stream"):
            return answer

        async def pieces() -> AsyncIterator[str]:
            yield f"data: {json.dumps(answer)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    await ready(uvicorn.Server(configured(app)))


@contextmanager
def serving(kind: str) -> Iterator[str]:
    """The address of a server that listens as `penstock serve` does, on a loop in a thread of its own."""
    from penstock.server.serve import listen
    from penstock.server.settings import ServerSettings

    listener = listen(ServerSettings(port=0))
    started, servers = threading.Event(), []

    async def ready(server: Any) -> None:
        servers.append(server)
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:  # noqa: ASYNC110  # it says so nowhere else
            await asyncio.sleep(0.01)
        started.set()
        await serving

    with tempfile.TemporaryDirectory() as folder, listener:
        make = _bare_server if kind == "bare" else _penstock_server
        url = "memory:" if kind == "memory" else f"sqlite:///{folder}/runs.db"
        thread = threading.Thread(target=lambda: asyncio.run(make(url, ready)))
        thread.start()
        started.wait(60)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            servers[0].should_exit = True
            thread.join(30)


def time_requests(kind: str, requests: int, clients: int, stream: bool) -> dict[str, Any]:
    """Requests a second and ms a request; the clients are in a process of their own."""
    with serving(kind) as url:
        return _asked_by_others(url, requests, clients, stream)


def _asked_by_others(url: str, requests: int, clients: int, stream: bool) -> dict[str, Any]:
    options = json.dumps({"url": url, "requests": requests, "clients": clients, "stream": stream})
    done = subprocess.run(
        [sys.executable, "-c", f"from benchmarks.service import ask_all; ask_all({options!r})"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: [figure] for name, figure in json.loads(done.stdout.splitlines()[-1]).items()}


def ask_all(text: str) -> None:
    """What a client process does: so many requests from so many threads, and prints how long they took."""
    import httpx2

    options = json.loads(text)
    each = options["requests"] // options["clients"]
    taken: list[float] = []

    def client() -> None:
        body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "stream": options["stream"]}
        with httpx2.Client(base_url=options["url"], timeout=60, trust_env=False) as http:
            for _ in range(each):
                started = time.perf_counter()
                response = http.post("/v1/chat/completions", json=body)
                taken.append(time.perf_counter() - started)
                expect("status", response.status_code, 200)
                expect("end", "[DONE]" in response.text, options["stream"])

    threads = [threading.Thread(target=client) for _ in range(options["clients"])]
    begun = time.perf_counter()
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    elapsed = time.perf_counter() - begun
    expect("answers", len(taken), each * options["clients"])
    cuts_ms = [one * 1_000 for one in statistics.quantiles(taken, n=100)]
    percentiles_ms = {"p50_ms": cuts_ms[49], "p95_ms": cuts_ms[94], "p99_ms": cuts_ms[98]}
    print(json.dumps({"per_s": len(taken) / elapsed, **percentiles_ms}))


# Readers that stall.


MODELS = """
from penstock.agents.scripted import ScriptedModel

models = {"echo": ScriptedModel(lambda request: "An answer of some ten words, as short as they come.", name="echo")}
"""


async def tell_much(url: str) -> None:
    """A graph that answers, and a run of another worker that is running and has more events than sockets hold."""
    from penstock.hosting.ports import HostedEvent, RunRecord
    from penstock.storage import open_stores

    async with await open_stores(url) as stores:
        await stores.graphs.save("echo", "bench", "echo", graph_that_answers(), now_ms=0)
        await stores.runs.add(RunRecord("long", "bench", "none", 1))
        run = await stores.runs.claim("worker", now_ms=10**13, lease_ms=10**12)
        expect("claimed", run is not None and run.id, "long")
        log = [HostedEvent(seq, 1, "text.delta", {"text": "x" * LONG}) for seq in range(1, LONG_LOG + 1)]
        for at in range(0, LONG_LOG, BATCH):
            await stores.events.append("long", 1, log[at : at + BATCH])


@contextmanager
def served_alone(folder: str) -> Iterator[tuple[str, int]]:
    """The address of a `penstock serve` on SQLite, and the id of its process."""
    Path(folder, "models.py").write_text(MODELS)
    url = f"sqlite:///{folder}/runs.db"
    asyncio.run(tell_much(url))
    options = ["--db", url, "--models", f"{folder}/models.py:models", "--port", "0", "--drain", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "serve", *options], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1], server.pid
        finally:
            server.terminate()


@contextmanager
def stalling(url: str, readers: int) -> Iterator[None]:
    """Clients that have requested the run's events and read only the headers."""
    host, port = url.removeprefix("http://").split(":")
    with ExitStack() as opened:
        for _ in range(readers):
            reader = opened.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            reader.connect((host, int(port)))
            reader.sendall(b"GET /api/runs/long/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            expect("status", reader.recv(12), b"HTTP/1.1 200")
        yield
        expect("open streams", _open_streams(url), readers)


def wait_until_idle(process: int) -> None:
    """Until it has nothing to do: what sockets hold is full then."""
    before = -1
    while (now := _ticks(process)) - before > 2:
        before = now
        time.sleep(0.5)


def _ticks(process: int) -> int:
    """The CPU time that it has taken, in hundredths of a second."""
    return sum(int(one) for one in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13])


def _open_streams(url: str) -> int:
    import httpx2

    lines = httpx2.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return int(float(next(line.split()[-1] for line in lines if line.startswith("penstock_sse_open_streams "))))


def time_beside_stalled(readers: int, requests: int, clients: int) -> dict[str, Any]:
    """Requests of others while so many readers of a stream stall, to a `penstock serve` on SQLite."""
    with tempfile.TemporaryDirectory() as folder, served_alone(folder) as (url, process), stalling(url, readers):
        _asked_by_others(url, clients, clients, False)  # the first answers of a server take longer
        wait_until_idle(process)
        return _asked_by_others(url, requests, clients, False)


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
                turn = await service.stream_chat(chat.id, "Some ten words that a user writes in a chat.", owner="bench")
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
        "model gets the whole conversation.",
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


def _ask_stalled(quick: bool) -> Table:
    requests, rounds = (80, 1) if quick else (200, 5)
    contestants = [Contestant("no reader stalls", "0"), Contestant(f"{STALLED} readers stall", str(STALLED))]
    play(
        contestants,
        rounds,
        lambda each: measure(
            each,
            "benchmarks.service",
            "time_beside_stalled",
            TIME_LIMIT_S,
            readers=int(each.name),
            requests=requests,
            clients=4,
        ),
    )
    return Table(
        f"Do others wait while {STALLED} readers of a stream do not read?",
        f"POST /v1/chat/completions to `penstock serve` on SQLite, {requests} requests of 4 clients, the median of "
        f"{rounds} shuffled rounds. Each reader has requested a run's events, {LONG * LONG_LOG // 1_000_000} MB, and "
        "reads none; what sockets hold is full when the requests begin.",
        ("", "p50 ms", "p99 ms", "p99 ms at worst"),
        [
            (each.label, _median(each, "p50_ms"), _median(each, "p99_ms"), each.trouble or max(each.figures("p99_ms")))
            for each in contestants
        ],
        raw={each.label: each.results for each in contestants},
    )


def _median(each: Contestant, figure: str) -> Cell:
    return each.trouble or statistics.median(each.figures(figure))


def _least(each: Contestant, figure: str) -> Cell:
    return each.trouble or min(each.figures(figure))


def _most(each: Contestant, figure: str) -> Cell:
    return each.trouble or max(each.figures(figure))


def _beyond(each: Contestant, other: Contestant, figure: str = "wall_us") -> Cell:
    if each is other or each.trouble or other.trouble or each.name == "floor":
        return None
    return max(0.0, min(each.figures(figure)) - min(other.figures(figure)))


def ask(quick: bool) -> list[Table]:
    """Journal, events, shared budgets, turns, requests, stalled readers; then whole servers, beside those of others."""
    questions = (_ask_journal, _ask_events, _ask_shared, _ask_turns, _ask_requests, _ask_stalled)
    return [*(question(quick) for question in questions), *ask_servers(quick)]


if __name__ == "__main__":
    main(ask)
