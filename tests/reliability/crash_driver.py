"""Runs a journalled graph in processes that may be killed, for the test of crashes.

A server of forks: it imports once, which takes seconds, and forks a child for each attempt, which takes none. It reads
one JSON line for each and answers with how the child ended. A child opens the stores, goes on with the run where it
is, and writes what it does to a file, line by line, each with one write: what was written survives the child. A kill
may come within a write, which leaves the beginning of a line: that was not said, and the next child takes it off.

A child that is to be killed in the middle of its work says when that begins, over a pipe: the kill comes so long after
that, however long it took to open a database or to wait for a lease.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from penstock.containment.limits import Budget
from penstock.containment.safety import ChainMetadata
from penstock.errors import LedgerError
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.journal import Journal, fork_journal
from penstock.runtime.durable.keys import entry_node, idempotency_key
from penstock.runtime.durable.shared import SharedBudget
from penstock.storage import open_stores
from penstock.testing import crash_points
from tests.nodes.graphs import events_of
from tests.runtime.durable.journalled import MANY_PARTS, PRICES, Log, Thinker, tools

RUN = "r"
ACCOUNT = f"run:{RUN}"
CEILING = Budget(max_cost_dollars=100.0)


class FileLog(Log):
    """What really ran, in a file that outlives the process."""

    def __init__(self, path: str, epoch: int) -> None:
        super().__init__()
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        os.truncate(self._file, len(said_whole(os.pread(self._file, os.fstat(self._file).st_size, 0))))
        self._epoch = epoch

    def ran(self) -> None:
        self.write(key=str(idempotency_key()))

    def write(self, **said: Any) -> None:
        os.write(self._file, json.dumps({"epoch": self._epoch, **said}).encode() + b"\n")


def said_whole(written: bytes) -> bytes:
    """The lines that have come to their end."""
    return written[: written.rfind(b"\n") + 1]


class Billing(Thinker):
    """Bills before it answers, as providers do."""

    async def request(self, request: Any) -> Any:
        turn = sum(message.role == "assistant" for message in request.messages)
        log = self._log
        assert isinstance(log, FileLog)
        log.write(billed=(100 + turn) * 1_000 + 10 * 10_000)
        await asyncio.sleep(0.001)
        return await super().request(request)


async def go_on(command: dict[str, Any]) -> None:
    """One process's part in the run."""
    epoch = command["epoch"]
    log = FileLog(command["log"], epoch)
    async with await open_stores(command["url"]) as stores:
        run_id = RUN
        if command.get("fork"):
            run_id = "forked"
            kept = await fork_journal(
                stores.journal, RUN, run_id, without=lambda entry: entry_node(entry.key) in ("left", "both", "out")
            )
            log.write(forked=len(kept))
        journal = await Journal.open(stores.journal, run_id)
        log.write(recorded=[f"{run_id}/{entry.key}" for entry in journal])
        shared = SharedBudget(stores.ledger, ACCOUNT, prefix=f"{run_id}/{epoch}")
        await asyncio.to_thread(_open, stores.ledger, shared)
        metadata = ChainMetadata(request_id=run_id, chain_id=run_id)
        context = ExecutionContext(
            None, None, metadata, input="go", prices=PRICES, journal=journal, shared_budget=shared
        )
        services = {"models": {"thinker": Billing(log)}, "tools": tools(log)}
        state = await journal.value("began", lambda: "once")
        _, result = await events_of(MANY_PARTS, run=context, services=services)
        context.end()
        await shared.acatch_up()
        balance = await asyncio.to_thread(stores.ledger.balance, ACCOUNT)
        outputs = {handle: value.value for handle, value in result.outputs.items()}
        log.write(
            done=outputs,
            state=state,
            committed=balance.spent_nanos + balance.held_nanos + balance.unresolved_nanos,
            held=balance.held_nanos,
            here=context.balance.spent_nanos,
            entries=sorted(entry.key for entry in await stores.journal.load(run_id)),
        )


def _open(ledger: Any, shared: SharedBudget) -> None:
    with suppress(LedgerError):  # it is open
        ledger.open_account(ACCOUNT, CEILING.limits())
    shared.adopt()


Work = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]


def serve(work: Work) -> None:
    """Fork a child for each line of input; say how each ended, and how long it was at work."""
    for line in sys.stdin:
        command = json.loads(line)
        heard, says = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(heard)
            _live(work, command, says)
        os.close(says)
        status, worked_s = _ended(child, heard, command.get("kill_after_s"))
        os.close(heard)
        sys.stdout.write(json.dumps({"status": status, "worked_s": worked_s}) + "\n")
        sys.stdout.flush()


def _live(work: Work, command: dict[str, Any], says: int) -> None:
    status = 1
    try:
        if begins_at := command.get("begins_at"):
            crash_points.arm(begins_at, die=lambda: _say(says))
        else:
            crash_points.arm(command.get("crash_at") or "")
        asyncio.run(work(command))
        status = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def _say(says: int) -> None:
    os.write(says, b".")


def _ended(child: int, heard: int, kill_after_s: float | None) -> tuple[int, float | None]:
    """How it ended, and how long after its work had begun, if it had; who is gone says no more."""
    began = time.monotonic() if os.read(heard, 1) else None
    if began is not None and kill_after_s is not None:
        is_over, _, _ = select.select([heard], [], [], kill_after_s)
        if not is_over:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), None if began is None else time.monotonic() - began


if __name__ == "__main__":
    serve(go_on)
