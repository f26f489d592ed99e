"""Implementation of `penstock exec`: a gateway on a loopback port, and a program that knows no other address.

The program shares the input and output of this process. Penstock's own output goes to standard error.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.cli.exits import Exit, Refused, WriteFailed
from penstock.cli.render.screen import print_error, write
from penstock.cli.render.text import counted
from penstock.cli.wrap.child import Child, harden_process
from penstock.cli.wrap.declared import declared_upstreams
from penstock.cli.wrap.own_folder import own_folder
from penstock.cli.wrap.status_line import shown_below
from penstock.front_door import contain
from penstock.gateway.app import Gateway
from penstock.gateway.connections import Connections
from penstock.gateway.environment import child_environment, write_codex_home
from penstock.gateway.grants import Grant, OneKey, UnknownCost
from penstock.gateway.loopback import serving
from penstock.gateway.upstreams import Upstream
from penstock.gateway.wires import PAYMENT_REQUIRED, Denied
from penstock.providers.http.exchange import Terms
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.context import ExecutionContext
from penstock.runtime.snapshot import totals
from penstock.stops import StopReason
from penstock.tracing.page import trace_html
from penstock.tracing.tree import trace_json, trace_tree

MAX_WAIT_S = 30.0
"""Maximum time that a request waits for the holds of other requests: well below the timeouts of clients."""
FLOOR = 16
RECORDS: Mapping[str, Callable[[ExecutionContext], str]] = {
    ".html": trace_html,
    ".json": trace_json,
    ".txt": trace_tree,
}
"""Renderers of a recorded run, by file suffix."""

OnHalt = Literal["refuse", "stop"]


@dataclass(frozen=True, slots=True)
class ExecArguments:
    """The parsed command line of `penstock exec`."""

    command: Sequence[str]
    limits: Mapping[str, object]
    """Limits by their names in `contain`."""
    prices: PriceBook
    on_halt: OnHalt = "refuse"
    unknown_cost: UnknownCost = "count"
    models: Sequence[str] = ()
    upstreams: Sequence[str] = ()
    kept: Sequence[str] = ()
    max_output_tokens: int = 4_096
    grace_s: float = 5.0
    record: Path | None = None
    quiet: bool = False


def exec_command(arguments: ExecArguments) -> int:
    """Run the program behind a gateway; return its exit code, or that of a halt if a limit stopped it."""
    _check_record(arguments.record)
    upstreams = declared_upstreams(arguments.upstreams)
    harden_process()
    run = contain(
        name=Path(arguments.command[0]).name or "exec",
        prices=arguments.prices,
        max_wait_s=MAX_WAIT_S,
        **arguments.limits,  # type: ignore[arg-type]  # checked by the command line
    )
    with run:
        contained = _Contained(arguments, run, upstreams)
        code = asyncio.run(contained.execute())
    _report(run, arguments)
    return contained.exit_code(code)


class _Contained:
    """One program behind one gateway."""

    def __init__(self, arguments: ExecArguments, run: ExecutionContext, upstreams: Mapping[str, Upstream]) -> None:
        self._arguments = arguments
        self._run = run
        self._upstreams = upstreams
        self._key = f"sk-penstock-{secrets.token_urlsafe(32)}"
        self._halted = asyncio.Event()
        self.was_ended = False
        """Whether this process ended the program."""

    async def execute(self) -> int:
        arguments = self._arguments
        terms = Terms(self._run, arguments.max_output_tokens, FLOOR)
        grant = Grant(terms, tuple(arguments.models), arguments.unknown_cost)
        connections = Connections()
        gateway = Gateway(self._upstreams, OneKey(self._key, grant), connections, self._denied)
        stream = None if arguments.quiet else sys.stderr
        try:
            async with serving(gateway) as url:
                with own_folder() as folder:
                    child = await Child.start(arguments.command, self._environment(url, folder))
                    with child.attended():
                        async with shown_below(stream, lambda: f"penstock: {totals(self._run)}"):
                            return await self._until_end(child)
        finally:
            await connections.aclose()

    def _environment(self, url: str, codex_home: Path) -> dict[str, str]:
        write_codex_home(codex_home, url, self._key)
        keys = [upstream.key for upstream in self._upstreams.values()]
        return child_environment(os.environ, url, self._key, codex_home, secrets=keys, kept=self._arguments.kept)

    async def _until_end(self, child: Child) -> int:
        """Wait for the program; end its group at the time limit, at a halt if so declared, and when it has ended."""
        waiting = asyncio.ensure_future(child.wait())
        halted = asyncio.ensure_future(self._halted.wait())
        timeout_s = self._arguments.limits.get("timeout_s")
        left_s = float(timeout_s) if isinstance(timeout_s, int | float) else None
        try:
            await asyncio.wait((waiting, halted), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            self.was_ended = not waiting.done()
            await child.end(self._arguments.grace_s)
            return await waiting
        finally:
            halted.cancel()
            await asyncio.wait((halted,))

    def _denied(self, denied: Denied) -> None:
        if denied.status == PAYMENT_REQUIRED and self._arguments.on_halt == "stop":
            self._halted.set()

    def exit_code(self, code: int) -> int:
        """Return the program's own code, unless a limit ended it, or it failed after a limit had refused a call."""
        stop = self._run.stop
        is_ours = stop is not None and stop.reason is not StopReason.ABORTED
        return Exit.HALTED if self.was_ended or (is_ours and code != 0) else code


def _check_record(path: Path | None) -> None:
    if path is not None and path.suffix not in RECORDS:
        raise Refused(f"--record must be a file that ends in {', '.join(RECORDS)}, not {str(path)!r}")
    if path is not None and not path.parent.is_dir():
        raise Refused(f"--record: there is no folder {str(path.parent)!r}")


def _report(run: ExecutionContext, arguments: ExecArguments) -> None:
    if not arguments.quiet:
        write(run.explain(), sys.stderr)
    if (stop := run.stop) is not None:
        print_error(f"stopped by a limit: {stop.message}")
    if unresolved := run.unresolved():
        calls = counted(len(unresolved), "call")
        print_error(f"{calls} with an unknown bill; the provider may charge up to what is held")
    if arguments.record is not None:
        _record(run, arguments.record)


def _record(run: ExecutionContext, path: Path) -> None:
    try:
        path.write_text(RECORDS[path.suffix](run), "utf-8")
    except OSError as error:
        raise WriteFailed(f"--record: {str(path)!r} cannot be written: {error.strerror}") from error
