"""Runs a journalled graph in processes that may be killed; a driver of `fork_server`.

Each process opens the stores, resumes the run where it is, and writes what it does to a log file, line by line, each
line with one write, so that it survives the process. A kill during a write leaves an incomplete line, which does not
count; the next process removes it.
"""

from __future__ import annotations

import asyncio
import json
import os
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
from tests.nodes.graphs import events_of
from tests.reliability.fork_server import serve
from tests.runtime.durable.journalled import MANY_PARTS, PRICES, Log, Thinker, tools

RUN = "r"
ACCOUNT = f"run:{RUN}"
CEILING = Budget(max_cost_dollars=100.0)


class FileLog(Log):
    """A log of what really ran, in a file that outlives the process."""

    def __init__(self, path: str, epoch: int) -> None:
        super().__init__()
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        os.truncate(self._file, len(complete_lines(os.pread(self._file, os.fstat(self._file).st_size, 0))))
        self._epoch = epoch

    def ran(self) -> None:
        self.write(key=str(idempotency_key()))

    def write(self, **facts: Any) -> None:
        os.write(self._file, json.dumps({"epoch": self._epoch, **facts}).encode() + b"\n")


def complete_lines(written: bytes) -> bytes:
    """What was written without the incomplete line at its end."""
    return written[: written.rfind(b"\n") + 1]


class BillingModel(Thinker):
    """Bills before it answers, as providers do."""

    async def request(self, request: Any) -> Any:
        turn = sum(message.role == "assistant" for message in request.messages)
        log = self._log
        assert isinstance(log, FileLog)
        log.write(billed=(100 + turn) * 1_000 + 10 * 10_000)
        await asyncio.sleep(0.001)
        return await super().request(request)


async def resume(command: dict[str, Any]) -> None:
    """Do one process's part of the run."""
    epoch = command["epoch"]
    log = FileLog(command["log"], epoch)
    async with await open_stores(command["url"]) as stores:
        run_id = RUN
        if command.get("fork"):
            run_id = "forked"
            copied = await fork_journal(
                stores.journal, RUN, run_id, without=lambda entry: entry_node(entry.key) in ("left", "both", "out")
            )
            log.write(forked=len(copied))
        journal = await Journal.open(stores.journal, run_id)
        log.write(recorded=[f"{run_id}/{entry.key}" for entry in journal])
        shared = SharedBudget(stores.ledger, ACCOUNT, prefix=f"{run_id}/{epoch}")
        await asyncio.to_thread(_open_account, stores.ledger, shared)
        metadata = ChainMetadata(request_id=run_id, chain_id=run_id)
        context = ExecutionContext(
            None, None, metadata, input="go", prices=PRICES, journal=journal, shared_budget=shared
        )
        services = {"models": {"thinker": BillingModel(log)}, "tools": tools(log)}
        state = await journal.value("began", lambda: "once")
        _, result = await events_of(MANY_PARTS, run=context, services=services)
        context.end()
        await shared.aflush()
        balance = await asyncio.to_thread(stores.ledger.balance, ACCOUNT)
        outputs = {handle: value.value for handle, value in result.outputs.items()}
        log.write(
            done=outputs,
            state=state,
            committed=balance.spent_nanos + balance.held_nanos + balance.unresolved_nanos,
            held=balance.held_nanos,
            spent_in_process=context.balance.spent_nanos,
            entries=sorted(entry.key for entry in await stores.journal.load(run_id)),
        )


def _open_account(ledger: Any, shared: SharedBudget) -> None:
    with suppress(LedgerError):  # an earlier process has opened it
        ledger.open_account(ACCOUNT, CEILING.limits())
    shared.recover()


if __name__ == "__main__":
    serve(resume)
