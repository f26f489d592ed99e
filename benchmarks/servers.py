"""What does a chat turn, a streamed word and a small run cost the server, beside the servers of others?

Each contestant is a process of its own on this machine, under the same client. CPU time comes from /proc, the server's
children included, so it holds on a busy machine; latencies and rates do not. `penstock serve` has every guarantee on:
runs are stored, journalled, held and settled in a ledger, and traced, and every word is committed before it is shown.
agno, ADK and penstock store the conversation in SQLite; `langgraph dev` keeps it in memory, and LiteLLM's proxy keeps
none. Rows on PostgreSQL need the server that the tests use; its fsync is off here, since a disk says nothing about a
program.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._peers import ROOT, NotInstalled, python_of
from benchmarks._report import Cell, Table, main
from benchmarks._rounds import Contestant, play, versions
from benchmarks._servers.load import Request, ask, ask_many, chat_at_once, connect
from benchmarks._servers.words import ANSWER

START_S = 120.0
WARM_UP = 20
CLIENTS = 8
PACE = 50
"""Words a second of each stream."""
SHORT, LONG = 50, 300
"""Words of a short and of a long answer; the difference is what words cost alone."""
FIRST_WORD_S = 1.0
"""A chat whose first word takes longer than this waits too long."""
SERVERS = "benchmarks._servers"
FLOW = [("start", "chat-start", {}), ("agent", "agent", {"model": "constant"})]
STREAMED = [("start", "chat-start", {}), ("agent", "agent", {"model": "words", "stream": True})]
SMALL = [
    ("start", "chat-start", {}),
    ("question", "prompt-template", {"template": "Say it in a word: {input}"}),
    ("first", "llm-completion", {"model": "constant"}),
    ("second", "llm-completion", {"model": "constant"}),
]
"""A small run: four nodes, two calls."""


def graph(name: str, nodes: Sequence[tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
    """A graph of nodes in a row."""
    ids = [id for id, _, _ in nodes]
    return {
        "id": name,
        "nodes": [
            {"id": id, "type": type, "position": {"x": at * 260, "y": 0}, "data": data}
            for at, (id, type, data) in enumerate(nodes)
        ],
        "edges": [
            {
                "id": f"{source}-{target}",
                "source": source,
                "sourceHandle": "output",
                "target": target,
                "targetHandle": "input",
                "data": {"channel": "flow"},
            }
            for source, target in itertools.pairwise(ids)
        ],
    }


SECRETS = [f"bench-secret-{number:04}" for number in range(20)]
"""Tokens of the people who chat at once: one person may have 100 streams."""


# Processes.


@dataclass(frozen=True, slots=True)
class Server:
    """A server that listens: its process and its address."""

    pid: int
    url: str


@contextmanager
def process(command: Sequence[str], port: int, folder: str, **environment: str) -> Iterator[Server]:
    """A server as a process of its own, from when it listens; its output goes to a file in the folder."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "NO_PROXY": "*", **environment}
    log = Path(folder, f"{port}.log")
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        ) as started,
    ):
        try:
            _await_port(started, port, log)
            yield Server(started.pid, f"http://127.0.0.1:{port}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGTERM)
            try:
                started.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)


def _await_port(started: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until_s = time.monotonic() + START_S
    while started.poll() is None and time.monotonic() < until_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise RuntimeError(f"the server does not listen: {log.read_text()[-1_000:]}")


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def penstock(folder: str, port: int, db: str) -> list[str]:
    """The command of a `penstock serve` with the graphs of these benchmarks."""
    graphs = Path(folder, "graphs")
    graphs.mkdir(exist_ok=True)
    for name, nodes in (("a", FLOW), ("words", STREAMED), ("small", SMALL)):
        (graphs / f"{name}.json").write_text(json.dumps(graph(name, nodes)))
    # All clients are one user here.
    many = ["--max-running", "2000", "--max-running-per-user", "2000", "--max-steps", "100000"]
    models = [f"--{what}={SERVERS}.penstock_models:{what}" for what in ("models", "prices")]
    command = [sys.executable, "-m", "penstock.cli", "serve", str(graphs), "--db", db, "--port", str(port)]
    return [*command, *models, *many, "--drain", "0"]


@contextmanager
def serving(kind: str, *, with_tokens: bool = False) -> Iterator[Server]:
    """The server of a contestant; a penstock of many people, if they have tokens."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command, environment = _command(kind, folder, port)
        if with_tokens and kind in ("memory", "sqlite"):
            lines = [f"person{number}:user:{secret}" for number, secret in enumerate(SECRETS)]
            Path(folder, "tokens").write_text("\n".join(lines))
            command += ["--tokens", f"{folder}/tokens"]
        with process(command, port, folder, **environment) as server:
            yield server


def _command(kind: str, folder: str, port: int) -> tuple[list[str], dict[str, str]]:
    number = str(port)
    if kind in ("memory", "sqlite"):
        return penstock(folder, port, "memory:" if kind == "memory" else f"sqlite:///{folder}/runs.db"), {}
    if kind == "bare":
        return [sys.executable, "-m", f"{SERVERS}.bare", number], {}
    python = Path(python_of(PEERS[kind]))
    if kind == "agno":
        return [str(python), "-m", f"{SERVERS}.agno", number], {"AGNO_TELEMETRY": "false"}
    if kind == "adk":
        agent = Path(folder, "agents", "a")
        agent.mkdir(parents=True)
        (agent / "__init__.py").write_text("")
        shutil.copy(ROOT / "benchmarks" / "_servers" / "adk.py", agent / "agent.py")
        uri = f"--session_service_uri=sqlite+aiosqlite:///{folder}/adk.db"
        return [str(python.parent / "adk"), "api_server", f"--port={number}", uri, str(agent.parent)], {}
    if kind == "langgraph":
        served = {"dependencies": ["."], "graphs": {"a": "./answers.py:graph"}}
        Path(folder, "langgraph.json").write_text(json.dumps(served))
        shutil.copy(ROOT / "benchmarks" / "_servers" / "langgraph.py", Path(folder, "answers.py"))
        options = ["dev", "--no-browser", "--no-reload", "--port", number, "--n-jobs-per-worker", "10"]
        return [str(python.parent / "langgraph"), *options], {"LANGGRAPH_NO_ANALYTICS": "1", "LANGSMITH_TRACING": "0"}
    about = {
        "model_list": [
            {
                "model_name": "a",
                "litellm_params": {"model": "openai/none", "api_key": "none", "mock_response": ANSWER},
            }
        ],
        "litellm_settings": {"telemetry": False},
    }
    Path(folder, "config.yaml").write_text(json.dumps(about))
    options = ["--config", "config.yaml", "--port", number, "--num_workers", "1"]
    environment = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    return [str(python.parent / "litellm"), *options], environment


PEERS = {"agno": "agno-os", "adk": "adk", "langgraph": "langgraph-dev", "litellm": "litellm"}
"""The environment of each peer."""


def _message(text: str, *, model: str = "a", stream: bool = False) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "stream": stream}


OPENAI = Request("/v1/chat/completions", _message("hello"), has=ANSWER)
ADK_TURN = {
    "app_name": "a",
    "user_id": "u",
    "session_id": "{id}",
    "new_message": {"role": "user", "parts": [{"text": "hello"}]},
}
TURNS = {
    "bare": OPENAI,
    "memory": OPENAI,
    "sqlite": OPENAI,
    "agno": Request("/agents/a/runs", {"message": "hello", "stream": "false"}, is_form=True, has=ANSWER),
    "adk": Request("/run", ADK_TURN, before="/apps/a/users/u/sessions/{id}", has=ANSWER),
    "langgraph": Request(
        "/runs/wait", {"assistant_id": "a", "input": {"messages": [{"role": "user", "content": "hello"}]}}, has=ANSWER
    ),
    "litellm": OPENAI,
}
"""One turn of a new conversation at each contestant."""


def streamed(kind: str, words: int, pace: int = PACE) -> tuple[Request, bytes]:
    """The request for an answer of so many words, and what its first word looks like."""
    text, last = f"{words} {pace}", f"w{words - 1} "
    if kind == "agno":
        return Request("/agents/a/runs", {"message": text, "stream": "true"}, is_form=True, has=last), b"w0 "
    model = "a" if kind == "bare" else "words"
    return Request("/v1/chat/completions", _message(text, model=model, stream=True), has=last), b"w0 "


def cpu_s(pid: int) -> float:
    """CPU time so far of a process, its children, and those that have ended."""
    total = 0
    for one in _family(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """Resident memory of a process and its children."""
    page, total = os.sysconf("SC_PAGE_SIZE"), 0
    for one in _family(pid):
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * page
    return total / 1_000_000


def _family(pid: int) -> list[int]:
    children: list[int] = []
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, each.read_text().split())
    return [pid, *(one for child in children for one in _family(child))]


# A turn.


def time_turns(kind: str, count: int) -> dict[str, list[float]]:
    """CPU ms of a turn with one client and with several, answers a second, and MB at the end."""
    with serving(kind) as server:
        request, urls = TURNS[kind], [server.url]
        asyncio.run(ask_many(urls, request, WARM_UP, 2))
        before = cpu_s(server.pid)
        alone = asyncio.run(ask_many(urls, request, max(10, count // 4), 1))
        between, started = cpu_s(server.pid), time.perf_counter()
        asyncio.run(ask_many(urls, request, count, CLIENTS))
        took_s = time.perf_counter() - started
        return {
            "alone_ms": [(between - before) * 1_000 / len(alone)],
            "p50_ms": [statistics.median(one.took_s for one in alone) * 1_000],
            "cpu_ms": [(cpu_s(server.pid) - between) * 1_000 / count],
            "per_s": [count / took_s],
            "mb": [memory_mb(server.pid)],
        }


def _record(each: Contestant, timed: Any) -> None:
    """Add a measurement of the contestant, or say why there is none."""
    try:
        each.results.append(timed())
    except NotInstalled:
        each.trouble = "not installed"
    except Exception as failed:
        error: Exception = failed
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        print(f"\n{each.label} FAILED\n{error}", file=sys.stderr, flush=True)
        each.trouble = "FAILED: " + (str(error).strip() or type(error).__name__).splitlines()[-1][:200]


def ask_turns(quick: bool) -> Table:
    """A turn at every server."""
    count, rounds = (100, 1) if quick else (400, 2)
    contestants = [
        Contestant("bare FastAPI, a constant", "bare"),
        Contestant("penstock serve, in memory", "memory"),
        Contestant("penstock serve, SQLite", "sqlite"),
        Contestant("agno AgentOS, SQLite", "agno", "agno-os"),
        Contestant("langgraph dev, in memory", "langgraph", "langgraph-dev"),
        Contestant("LiteLLM proxy, no database", "litellm", "litellm"),
        Contestant("ADK api_server, SQLite", "adk", "adk"),
    ]
    play(contestants, rounds, lambda each: _record(each, lambda: time_turns(each.name, count)))
    return Table(
        "What does a chat turn cost the server?",
        f"One turn of a new conversation, one agent whose model answers a constant. CPU ms of the server, the least of "
        f"{rounds} shuffled rounds: {count} turns by {CLIENTS} clients, and {max(10, count // 4)} by one.",
        ("", f"CPU ms, {CLIENTS} clients", "alone", "p50 ms alone", "turns/s", "MB"),
        [
            (
                each.label,
                *(each.trouble or min(each.figures(name)) for name in ("cpu_ms", "alone_ms", "p50_ms")),
                *(max(each.figures(name), default=None) for name in ("per_s", "mb")),
            )
            for each in contestants
        ],
        versions=versions(contestants),
        raw={each.label: each.results for each in contestants},
    )


# A word.


def time_words(kind: str, streams: int) -> dict[str, list[float]]:
    """CPU µs of a streamed word: with its turn, in a long answer, and alone."""
    with serving(kind) as server:
        spent = []
        for words in (5, SHORT, LONG):  # the first is to warm up
            request, marker = streamed(kind, words)
            before = cpu_s(server.pid)
            asyncio.run(chat_at_once(server.url, request, streams, 0.5, marker))
            spent.append((cpu_s(server.pid) - before) * 1e6 / streams)
        return {"us": [spent[2] / LONG], "alone_us": [(spent[2] - spent[1]) / (LONG - SHORT)]}


def ask_words(quick: bool) -> Table:
    """A streamed word at the servers that stream and store."""
    rounds, sizes = (1, (20,)) if quick else (2, (20, 60))
    kinds: list[tuple[str, str, str | None]] = [
        ("bare FastAPI", "bare", None),
        ("penstock serve, SQLite", "sqlite", None),
        ("penstock serve, in memory", "memory", None),
        ("agno AgentOS, SQLite", "agno", "agno-os"),
    ]
    contestants = [
        Contestant(f"{label}, {streams} streams", kind, peer, {"streams": streams})
        for streams in sizes
        for label, kind, peer in kinds
    ]

    def once(each: Contestant) -> None:
        streams = int(str(each.settings["streams"]))
        _record(each, lambda: time_words(each.name, streams))

    play(contestants, rounds, once)
    return Table(
        "What does a streamed word cost the server?",
        f"Streams of {PACE} words a second. CPU µs of the server, the median of {rounds} shuffled rounds: a word of "
        f"an answer of {LONG} words, its turn included, and alone (the difference to an answer of {SHORT} words).",
        ("", "CPU µs a word", "alone"),
        [(each.label, _median(each, "us"), _median(each, "alone_us")) for each in contestants],
        versions=versions(contestants),
        raw={each.label: each.results for each in contestants},
    )


def _median(each: Contestant, figure: str) -> Cell:
    return each.trouble or statistics.median(each.figures(figure))


# Chats at once.


def time_crowd(kind: str, chats: int, pace: int) -> dict[str, list[float]]:
    """Seconds to the first word, at the median and of the slowest in a hundred, while so many chats are open."""
    length_s = 8
    with serving(kind, with_tokens=True) as server:
        warm, marker = streamed(kind, 5, pace)
        asyncio.run(chat_at_once(server.url, warm, 10, 0.1, marker, SECRETS))
        request, marker = streamed(kind, length_s * pace, pace)
        before, started = cpu_s(server.pid), time.perf_counter()
        answers = asyncio.run(chat_at_once(server.url, request, chats, length_s * 0.75, marker, SECRETS))
        took_s = time.perf_counter() - started
        first = sorted(one.first_s - 1 / pace for one in answers)  # the model's own time to its first word
        return {
            "p50_s": [first[len(first) // 2]],
            "p99_s": [first[len(first) * 99 // 100]],
            "most_s": [first[-1]],
            "took_s": [took_s],
            "busy": [(cpu_s(server.pid) - before) / took_s],
            "mb": [memory_mb(server.pid)],
        }


def ask_crowd(quick: bool) -> Table:
    """How many chats one process serves at once."""
    sizes = (100,) if quick else (100, 250, 500, 750)
    contestants = [
        Contestant(f"{label}, {chats} chats, {pace} words/s each", kind, peer, {"chats": chats, "pace": pace})
        for chats in sizes
        for pace in (10, PACE)
        for label, kind, peer in (("penstock serve, SQLite", "sqlite", None), ("agno AgentOS", "agno", "agno-os"))
    ]

    def once(each: Contestant) -> None:
        chats, pace = (int(str(each.settings[name])) for name in ("chats", "pace"))
        _record(each, lambda: time_crowd(each.name, chats, pace))

    play(contestants, 1, once)
    return Table(
        "How many chats does one process serve at once?",
        "Chats of 8 s each, begun over 6 s, so that all are open together. Seconds until a chat's first word beyond "
        "the model's own time, wall, and how much of a core the server took meanwhile.",
        ("", "p50 s", "p99 s", "slowest s", "all took s", "cores", "MB"),
        [
            (each.label, *(_median(each, name) for name in ("p50_s", "p99_s", "most_s", "took_s", "busy", "mb")))
            for each in contestants
        ],
        versions=versions(contestants),
        raw={each.label: each.results for each in contestants},
    )


# PostgreSQL.


@contextmanager
def postgres(*, logs: bool = False) -> Iterator[tuple[str, int, Path]]:
    """A new PostgreSQL server with default settings but fsync: the URL of a database, its process, and its log."""
    import asyncpg  # type: ignore[import-untyped]

    from tests.storage.postgres import start_server

    async def execute(*statements: str) -> None:
        connection = await asyncpg.connect(url)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-pg-"))
    try:
        server = start_server(folder)
        url = server.get_uri().replace("postgres:@", "postgres:unused@")
        settings = {"fsync": "off", "log_statement": "all" if logs else "none"}
        asyncio.run(execute(*(f"ALTER SYSTEM SET {name} = '{value}'" for name, value in settings.items())))
        asyncio.run(execute("SELECT pg_reload_conf()"))
        try:
            pid = int((folder / "postmaster.pid").read_text().splitlines()[0])
            yield url, pid, folder / "log"
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


RUN = Request("/api/runs?stream=true", {"graph_id": "small", "input": "hello"}, has="run.completed")


@contextmanager
def processes(url: str, count: int) -> Iterator[list[Server]]:
    """So many `penstock serve` on one database, started one after the other."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        servers = []
        for _ in range(count):
            port = free_port()
            servers.append(opened.enter_context(process(penstock(folder, port, url), port, folder)))
        yield servers


def time_runs(count: int, runs: int, clients: int = CLIENTS) -> dict[str, list[float]]:
    """CPU ms of a small run in the servers and in PostgreSQL, and runs a second, with so many processes."""
    with postgres() as (url, pid, _), processes(url, count) as servers:
        urls = [server.url for server in servers]
        asyncio.run(ask_many(urls, RUN, WARM_UP * count, CLIENTS))
        ours, theirs = sum(cpu_s(server.pid) for server in servers), cpu_s(pid)
        started = time.perf_counter()
        asyncio.run(ask_many(urls, RUN, runs, clients))
        took_s = time.perf_counter() - started
        return {
            "server_ms": [(sum(cpu_s(server.pid) for server in servers) - ours) * 1_000 / runs],
            "postgres_ms": [(cpu_s(pid) - theirs) * 1_000 / runs],
            "per_s": [runs / took_s],
        }


STATEMENT = re.compile(r"LOG:  (?:statement|execute [^:]*): (.*)")


def count_statements(runs: int) -> dict[str, list[float]]:
    """Statements of a small run, and those of them that begin, end or reset; without those of an idle server."""
    with postgres(logs=True) as (url, _, log), processes(url, 1) as (server,):

        def logged() -> list[str]:
            return STATEMENT.findall(log.read_text(errors="replace"))

        async def one_by_one() -> None:
            connection = await connect(server.url)
            try:
                for _ in range(runs):
                    await ask(server.url, connection, RUN)
            finally:
                connection.close()

        asyncio.run(ask_many([server.url], RUN, WARM_UP, 1))
        begun = len(logged())
        time.sleep(IDLE_S)
        idle_per_s = (len(logged()) - begun) / IDLE_S
        begun, started = len(logged()), time.perf_counter()
        asyncio.run(one_by_one())
        took_s = time.perf_counter() - started
        time.sleep(0.1)
        made = logged()[begun:]
        idle = idle_per_s * took_s
        framing = sum(bool(re.match(r"BEGIN|COMMIT|ROLLBACK|SELECT pg_advisory_unlock_all|SET ", one)) for one in made)
        return {
            "statements": [(len(made) - idle) / runs],
            "framing": [framing / runs],
            "notify": [sum("pg_notify" in one for one in made) / runs],
            "idle_per_s": [idle_per_s],
        }


IDLE_S = 5.0


def ask_postgres(quick: bool) -> list[Table]:
    """Small runs on one PostgreSQL: their statements, and their CPU time by the number of processes."""
    runs, rounds = (60, 1) if quick else (400, 2)
    counted = Contestant("penstock serve", "statements")
    _record(counted, lambda: count_statements(20 if quick else 100))
    statements = Table(
        "How many statements does a small run make on PostgreSQL?",
        "Four nodes, two model calls, followed to its end over HTTP; statements in the server's log, without those "
        "that an idle `penstock serve` makes in the same time.",
        ("", "statements", "BEGIN, COMMIT, reset", "NOTIFY", "idle, a second"),
        [
            (
                counted.label,
                *(_median(counted, name) for name in ("statements", "framing", "notify", "idle_per_s")),
            )
        ],
        raw={counted.label: counted.results},
    )
    contestants = [
        Contestant(f"{count} process{'es' * (count > 1)}", str(count), None, {"count": count}) for count in (1, 2, 4, 8)
    ]

    def once(each: Contestant) -> None:
        count = int(str(each.settings["count"]))
        _record(each, lambda: time_runs(count, runs))

    play(contestants, rounds, once)

    def total(each: Contestant) -> float:
        return min(
            ours + theirs for ours, theirs in zip(each.figures("server_ms"), each.figures("postgres_ms"), strict=True)
        )

    one = contestants[0]
    scaling = Table(
        "Do more processes on one PostgreSQL cost more?",
        f"The same run, {runs} of them by {CLIENTS} clients. CPU ms of a run in the servers and in PostgreSQL, the "
        f"least of {rounds} shuffled rounds.",
        ("penstock serve", "CPU ms, server", "PostgreSQL", "together", "× one process", "runs/s"),
        [
            (
                each.label,
                each.trouble or min(each.figures("server_ms")),
                each.trouble or min(each.figures("postgres_ms")),
                each.trouble or total(each),
                each.trouble or one.trouble or total(each) / total(one),
                each.trouble or max(each.figures("per_s")),
            )
            for each in contestants
        ],
        raw={each.label: each.results for each in contestants},
    )
    return [statements, scaling]


def ask_servers(quick: bool) -> list[Table]:
    """Turns, words, chats at once, and runs on PostgreSQL."""
    return [ask_turns(quick), ask_words(quick), ask_crowd(quick), *ask_postgres(quick)]


if __name__ == "__main__":
    main(ask_servers)
