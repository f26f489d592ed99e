"""The probes that every framework goes through, and how one is measured.

A program of `programs/` passes one function per probe to `drive`. Each probe gets a provider and a run of its own, and
prints one JSON line. The invoice of the provider is read after the run has ended and nothing is in flight, so that
requests that outlive the run are on it.

Runs in the environment of a framework, which has Penstock and its own dependencies, and no tools of this repository.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from penstock import CancelledError, Halted, contain, contained
from penstock.testing.provider import FakeProviderServer, Hang, Say, ToolCall, WireRequest

CALL_USD = 0.02
CEILING_USD = 0.10
MODEL = "gpt-4o-mini"
"""A name that every framework knows; the provider answers to any."""
REPEATS = 20
"""Calls of a probe that has to reach the ceiling; five are paid for."""
THREADS = 8
LATENCY_S = 0.02
ABORT_AFTER_S = 0.5
TOOL_S = 6.0
"""Duration of a tool that its run's time limit has to stop."""
TOOL_TIMEOUT_S = 2.0
"""Long enough for the first request of any framework on a busy machine: the tool has to have begun."""
MAX_PROBE_S = 25.0
QUIET_S = 0.5
"""Time without a request after which a probe is over."""
CAUSED_BY = "caused by "
"""Begins the note of a line whose outcome was made of an error of ours."""


@dataclass(frozen=True, slots=True)
class Site:
    """What a probe is given."""

    run: Any
    server: FakeProviderServer
    model: str = MODEL

    @property
    def openai_url(self) -> str:
        return self.server.openai_url

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def key(self) -> str:
        return "none"


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one probe, as it is printed."""

    framework: str
    version: str
    probe: str
    invoice_usd: float
    ledger_usd: float
    ceiling_usd: float
    uncontained: int
    """Requests that the run itself reports as uncontained."""
    outcome: str
    seconds: float
    note: str = ""


Work = Callable[[Site], Any]
Script = Callable[[WireRequest], Say]


def in_threads(work: Callable[[], object]) -> None:
    """Run `work` again and again on threads that were started inside the scope, and raise its first error."""
    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(work) for _ in range(REPEATS)]:
            future.result()


def use_tools(request: WireRequest) -> Say:
    """Play a model that calls the first tool it is offered, once, and answers after its result."""
    tools = {name: parameters for tool in request.fields.get("tools") or () for name, parameters in _declared(tool)}
    final = next((name for name in tools if name in ("final_answer", "final_result")), None)
    if tools and not _has_result(request):
        name = next((name for name in tools if name != final), final)
    else:
        name = final
    if name is None:
        return Say("done")
    return Say(tool_calls=(ToolCall(name, _filled(tools[name])),))


def _declared(tool: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the name and the parameters of each function of a tool; Gemini has several in one."""
    functions = tool.get("functionDeclarations") or [tool.get("function", tool)]
    return [(function["name"], _parameters(function)) for function in functions if "name" in function]


def _parameters(function: Mapping[str, Any]) -> Any:
    """Return the schema of a function's parameters, under any of the names that Gemini's clients have for it."""
    names = ("parameters", "parametersJsonSchema", "parameters_json_schema")
    return next((function[name] for name in names if function.get(name)), {})


def _filled(schema: Mapping[str, Any]) -> dict[str, Any]:
    values = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
    required = schema.get("required") or ()
    properties = schema.get("properties") or {}
    kinds = {name: str(properties.get(name, {}).get("type")).lower() for name in required}  # Gemini's are in capitals
    return {name: values.get(kind, "dams") for name, kind in kinds.items()}


def _has_result(request: WireRequest) -> bool:
    messages = request.fields.get("messages") or request.fields.get("input") or request.fields.get("contents") or ()
    items = [item for item in messages if isinstance(item, dict)]
    parts = [part for item in items if "parts" in item for part in item["parts"]]
    return any("functionResponse" in part for part in parts) or any(
        item.get("role") in ("tool", "tool-response") or item.get("type") == "function_call_output" for item in items
    )


def hang(request: WireRequest) -> Say:
    """Play a model that never answers."""
    return Say(then=Hang())


WITH_TOOLS = ("subagents", "tool")
"""Probes in which the model has to call a tool."""
PROBES = (
    "single",
    "embeddings",
    "threads",
    "fanout",
    "streaming",
    "subagents",
    "ceiling",
    "tool",
    "cancel",
    "cancel_async",
)
"""Every probe, in the order in which they run: those that may leave something behind come last."""


def drive(
    framework: str,
    distribution: str,
    /,
    *,
    script: Script | None = None,
    tools_script: Script = use_tools,
    **works: Work,
) -> None:
    """Run the probes that a program has, print a line for each, and end the process.

    `script` is the model of most probes; without one it repeats its input. `tools_script` is that of the probes with
    tools. The model of the cancel probes never answers.
    """
    version = importlib.metadata.version(distribution)
    only = os.environ.get("ADOPT_PROBES", "").split()
    for probe in PROBES:
        if probe in works and (not only or probe in only):
            model = hang if probe.startswith("cancel") else tools_script if probe in WITH_TOOLS else script
            print(json.dumps(asdict(measure(framework, version, probe, works[probe], model))), flush=True)
    sys.stdout.flush()
    os._exit(0)  # a probe that hangs has a thread that never ends


def measure(framework: str, version: str, probe: str, work: Work, script: Script | None) -> Line:
    """Run one probe against a provider of its own."""
    with FakeProviderServer.flat(CALL_USD, script, model=MODEL, latency_s=LATENCY_S) as server:
        run = contain(
            max_cost_usd=CEILING_USD,
            prices=server.provider.prices,
            timeout_s=TOOL_TIMEOUT_S if probe == "tool" else None,
            divergence=False,
        )
        result: list[BaseException | None] = []
        thread = threading.Thread(target=_run, args=(Site(run, server), work, result), daemon=True)
        began = time.monotonic()
        if probe.startswith("cancel"):
            threading.Thread(target=_abort, args=(Site(run, server),), daemon=True).start()
        thread.start()
        thread.join(MAX_PROBE_S)
        seconds = time.monotonic() - began
        _settle(server)
        balance = run.balance
        ledger = balance.spent_usd + balance.held_usd + balance.unresolved_usd
        outcome, note = _outcome(result)
        unseen = len(server.requests) - run.stats.model_call_count - run.stats.failed_count
        if os.environ.get("ADOPT_EXPLAIN"):
            print(run.explain(), file=sys.stderr)
        return Line(
            framework,
            version,
            probe,
            round(server.invoice.total_usd, 4),
            round(ledger, 4),
            CEILING_USD,
            _uncontained(run),
            outcome,
            round(seconds, 1),
            "; ".join(filter(None, [note, f"{unseen} requests not in the tree" if unseen > 0 else ""])),
        )


def _run(site: Site, work: Work, result: list[BaseException | None]) -> None:
    async def amain() -> None:
        async with site.run:
            with contained(site.run):
                await work(site)

    try:
        if inspect.iscoroutinefunction(work):
            asyncio.run(amain())
        else:
            with site.run, contained(site.run):
                work(site)
    except BaseException as error:
        if os.environ.get("ADOPT_EXPLAIN"):
            import traceback

            traceback.print_exc()
        result.append(error)
    else:
        result.append(None)


def _abort(site: Site) -> None:
    site.server.wait_until(lambda: site.server.requests, timeout_s=MAX_PROBE_S)
    time.sleep(ABORT_AFTER_S)
    site.run.abort("cancelled by the probe")


def _settle(server: FakeProviderServer) -> None:
    """Wait until no request has come for a while."""
    ends, seen, since = time.monotonic() + MAX_PROBE_S, len(server.requests), time.monotonic()
    while time.monotonic() < min(ends, since + QUIET_S):
        time.sleep(QUIET_S / 10)
        if len(server.requests) != seen:
            seen, since = len(server.requests), time.monotonic()


def _uncontained(run: Any) -> int:
    found = re.search(r"(\d+) uncontained", run.explain())
    return int(found[1]) if found else 0


def _outcome(result: list[BaseException | None]) -> tuple[str, str]:
    if not result:
        return "never returned", ""
    error = result[0]
    if error is None:
        return "returned", ""
    ours = _ours_in(error)
    is_asyncio = isinstance(error, asyncio.CancelledError)
    name = "asyncio.CancelledError" if is_asyncio else type(error).__name__
    if ours is error:
        return name, ""
    return name, f"{CAUSED_BY}{type(ours).__name__}" if ours else str(error)[:200]


def _ours_in(error: BaseException) -> BaseException | None:
    """Return our error among an error, its causes and its groups, which may contain each other."""
    todo: list[BaseException | None] = [error]
    seen: list[BaseException] = []
    while todo:
        found = todo.pop(0)
        if found is None or found in seen:
            continue
        if isinstance(found, Halted | CancelledError):
            return found
        seen.append(found)
        todo += [found.__cause__, found.__context__]
        if isinstance(found, BaseExceptionGroup):
            todo += found.exceptions
    return None
