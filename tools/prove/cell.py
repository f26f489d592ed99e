"""Run one cell: one program against a provider of its own, and print what was measured.

    python -m tools.prove.cell CONTESTANT PROBE PYTHON FOLDER

The provider is in this process, the program in another one, in the environment of its contestant.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.testing import FakeProvider
from penstock.testing.provider import FakeProviderServer, WireRequest
from tools.environments import last_line
from tools.prove.probes import PROBES, TOKENS, Facts, Probe, messages_of
from tools.prove.site import MARK, Site

NS_PER_S = 1_000_000_000
QUIET_S = 0.5
"""Time without a request after which a cell is over."""
KILL_AFTER_S = 0.5
POLL_S = 0.02
USD_PER_MTOK = 1_000_000 * Site("", Path()).call_usd / TOKENS


def main(contestant: str, probe: str, python: str, folder: str) -> None:
    print(json.dumps(asdict(measure(contestant, PROBES[probe], python, Path(folder)))))


def measure(contestant: str, probe: Probe, python: str, folder: Path) -> Facts:
    """Run the program, twice if it is killed, and wait until no request comes any more."""
    folder.mkdir(parents=True, exist_ok=True)
    provider = FakeProvider(
        model=Site("", folder).model,
        input_usd_per_mtok=0,
        output_usd_per_mtok=USD_PER_MTOK,
        latency_s=probe.latency_s,
    )
    script = probe.script()
    count = 0

    def counting(request: WireRequest) -> Any:
        nonlocal count
        count += 1
        (folder / f"asked-{count}").touch()
        return script(request)

    with FakeProviderServer(provider, counting) as server:
        began = time.monotonic()
        reports: list[dict[str, Any]] = []
        problem, ended = "", True
        for attempt in (1, 2) if probe.kill_at else (1,):
            kills = bool(probe.kill_at) and attempt == 1
            output, errors, ended = _attempt(contestant, probe, python, folder, server, attempt, kills=kills)
            found = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
            reports += [{**report, "at": round(report["at"] - began, 3), "attempt": attempt} for report in found]
            raised = next((str(report["text"]) for report in found if report["kind"] == "raised"), "")
            if raised:
                problem = f"the program raised {raised}"
            elif kills and not ended:
                problem = "the program ended before it could be killed"
            elif not found:
                problem = f"the program did not start: {last_line(errors)}"
            elif not kills and ended and not any(report["kind"] == "returned" for report in found):
                problem = f"the program ended without a result: {last_line(errors)}"
            (folder / f"stderr-{attempt}.txt").write_text(errors)
            if problem:
                break
        _settle(server)
        return Facts(
            invoice_usd=round(server.invoice.total_usd, 4),
            requests=tuple(
                {"at": round(request.at_ns / NS_PER_S - began, 3), "messages": messages_of(request)}
                for request in server.requests
                if request.method == "POST"
            ),
            hung_up=tuple(round(one.at_ns / NS_PER_S - began, 3) for one in server.disconnects),
            reports=tuple(reports),
            problem=problem,
            ended=ended,
        )


def _attempt(
    contestant: str, probe: Probe, python: str, folder: Path, server: FakeProviderServer, attempt: int, *, kills: bool
) -> tuple[str, str, bool]:
    """Return the output and errors of one process, and whether it ended as it has to: by itself, or killed in time."""
    command = [python, "-m", "tools.prove.child", contestant, probe.name, server.url, str(folder), str(attempt)]
    paths = folder / f"out-{attempt}", folder / f"err-{attempt}"
    with paths[0].open("wb") as out, paths[1].open("wb") as err:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=err, start_new_session=True)
        try:
            ended = _wait_for_request(server, probe, process) if kills else _wait(process, probe.max_s)
        finally:
            with suppress(ProcessLookupError):  # also what the program has started: a proxy, a pool
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return paths[0].read_text(errors="replace"), paths[1].read_text(errors="replace"), ended


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return True
    return False


def _wait_for_request(server: FakeProviderServer, probe: Probe, process: subprocess.Popen[bytes]) -> bool:
    """Return when a request that the program is killed at has been with the provider for a moment."""
    ends = time.monotonic() + probe.max_s
    while time.monotonic() < ends and process.poll() is None:
        if any(probe.kill_at in request.last_text for request in server.requests):
            time.sleep(KILL_AFTER_S)
            return process.poll() is None
        time.sleep(POLL_S)
    return False


def _settle(server: FakeProviderServer) -> None:
    seen, since = len(server.requests), time.monotonic()
    while time.monotonic() < since + QUIET_S:
        time.sleep(POLL_S)
        if len(server.requests) != seen:
            seen, since = len(server.requests), time.monotonic()


if __name__ == "__main__":
    main(*sys.argv[1:])
