"""A run while it goes on: a moving picture on a terminal, a line for each call anywhere else.

All that is shown comes from the run's events and figures, so the run waits for nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.cli.showing import picture
from penstock.cli.showing.calls import Calls, Shown
from penstock.cli.showing.screen import Line, Screen, printable
from penstock.runtime.context import ExecutionContext
from penstock.tracing.events import CallEnded

CATCH_UP_S = 2.0


@contextmanager
def watched(
    run: ExecutionContext, screen: Screen, *, planned: Sequence[str] = (), moves: bool = True
) -> Iterator[None]:
    """Show `run` on `screen` until the block is left."""
    moves = moves and screen.moves
    calls = Calls(planned) if moves else Told(screen)

    def now() -> list[Line]:
        elapsed_s = run.usage.time_elapsed_seconds
        return picture.frame(calls, run.balance, elapsed_s, screen.width, screen.height)

    observing = run.observe(calls.take)
    if moves:
        with screen.moving(now):
            yield
            observing.drain(timeout_s=CATCH_UP_S)
    else:
        yield
        observing.drain(timeout_s=CATCH_UP_S)


class Told(Calls):
    """The same for pipes and logs: a line for each call that ends."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def ended(self, call: Shown, event: CallEnded) -> None:
        if call is self.root:
            return
        # The calls below one say what stopped them; it itself only needs the word.
        why = call.why.partition(":")[0] if call.made_calls else call.why
        words = f"{call.path:<24} {'  '.join(filter(None, [call.said, call.attempt, event.model, why]))}"
        self._screen.show([*picture.clock(event, self.began_ms), picture.mark(event.status), (printable(words), "")])
