"""A call on its way through the door: what is known of it before, while and after it runs."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from penstock.containment import accounts
from penstock.containment.accounts import Taken
from penstock.containment.safety import Decision, ToolCallContext
from penstock.containment.shield import Verdict
from penstock.errors import BudgetExceededError, CancelledError, Halted, LedgerError
from penstock.money import Usd, to_usd
from penstock.runtime.billing.usage import Usage
from penstock.runtime.cancellation import CancellationToken
from penstock.stops import LIMIT_REASONS, Stop, StopReason
from penstock.tracing.record import CallRecord

if TYPE_CHECKING:
    from penstock.runtime.handle import Handle

running_call: ContextVar[Call | None] = ContextVar("penstock_call", default=None)
"""The call that is being executed here; calls made meanwhile are its children."""

ALLOW, RETRY = Decision.ALLOW, Decision.RETRY
"""Every call reads them, and looking a member up in its enum costs as much as a function call."""


class Call(Taken):
    """One call on its way through the door, and what came of it. What it holds is written into the call itself."""

    __slots__ = (
        "above",
        "billed_below",
        "context",
        "decision",
        "degraded",
        "error",
        "failed_below",
        "hinted",
        "permit",
        "record",
        "stop",
        "token",
        "unknown",
        "usage",
        "value",
    )

    context: Handle
    record: CallRecord
    hinted: bool
    token: CancellationToken
    above: Call | None
    """The call of the same run that made this one."""
    billed_below: list[Any] | None
    """Values whose usage a call made by this one has paid for: handing one on costs nothing more."""
    failed_below: BaseException | None
    """The last error a call made by this one ended with: passing it on is neither billed nor retried again."""
    decision: Decision
    value: Any
    error: BaseException | None
    stop: Stop | None
    """Why the call did not run, or was stopped; None if nothing stopped it."""
    degraded: Verdict | None
    """Set when a hook let the call run in degraded form only."""
    usage: Usage | None
    """What the function itself reported while it ran."""
    permit: int | None
    unknown: bool
    """It was billed, and nobody could tell how much; while that is so, the run's cost is a lower bound."""

    def __init__(
        self,
        context: Handle,
        record: CallRecord,
        hinted: bool,
        token: CancellationToken,
        above: Call | None = None,
    ) -> None:
        self.context = context
        self.record = record
        self.hinted = hinted
        self.token = token
        self.above = above
        self.decision = ALLOW
        self.unknown = False
        self.value = self.error = self.stop = self.degraded = self.usage = self.permit = None
        self.billed_below = self.failed_below = None

    @property
    def hold(self) -> Taken | None:
        """What the call has taken; None if it was refused before it held anything."""
        return None if self.state is None else self

    @property
    def is_unpriced(self) -> bool:
        """Whether it may be billed although nothing is held for it: a model call that nobody knows the price of."""
        return self.record.kind == "llm" and not self.hinted and self._held_cost == 0

    @property
    def attempt(self) -> int:
        """The how-manieth attempt this is; its record says so too, from the second on."""
        attempt: int = (self.record.metadata or {}).get("attempt", 1)
        return attempt

    @property
    def node_id(self) -> str:
        """The id of this call in the run's graph."""
        return self.record.node_id

    @property
    def cost_usd(self) -> float:
        """What the call cost, as far as that is settled."""
        late = self.record.settled
        settled = getattr(self.record, "cost", 0) + (late.cost if late else 0)
        return to_usd(settled)

    @property
    def degraded_model(self) -> str | None:
        """The model a hook wants instead, if the call runs in degraded form."""
        return self.degraded.model if self.degraded else None

    def settle(
        self,
        *,
        cost_usd: Usd = 0,
        input_tokens: int = 0,
        output_tokens: int = 0,
    ) -> None:
        """Say what a call with an unknown bill has cost after all, 0 if nothing; LedgerError if its bill is known."""
        usage = Usage.of(cost_usd=cost_usd, input_tokens=input_tokens, output_tokens=output_tokens)
        run, cost = self.context._run, usage.cost_nanos or 0
        now_ns = run.now()
        with run.lock:
            if self.state == "unresolved":
                accounts.settle(self, cost, input_tokens, output_tokens, False)
            elif self.unknown:
                accounts.charge(self.context._account, cost, input_tokens, output_tokens, 0)
            else:
                raise LedgerError(f"the bill of call {self.node_id} is not open")
            was_unknown, self.unknown = self.unknown, False
            run.unknown_costs -= was_unknown
            run.graph.settle_late(self.record, now_ns, cost, input_tokens, output_tokens)
        if run.shared is not None:
            from penstock.runtime.durable import holding

            if was_unknown:
                holding.note_unknown(run.shared, self)
            holding.note_late_bill(run.shared, self, cost, input_tokens, output_tokens)

    def result(self) -> Any:
        """The value; or raise what kept the call from having one."""
        if self.stop is not None:
            raise stopped(self.context, self.stop) from self.error
        if self.error is not None:
            raise self.error
        return self.value


def stopped(context: Handle, stop: Stop) -> Halted | CancelledError:
    """The exception that tells of `stop`, with what was used and what is already there."""
    if stop.reason is StopReason.ABORTED:
        return CancelledError(stop.message, stop=stop)
    partial = context._run.partial_results()
    if stop.reason in LIMIT_REASONS:
        return BudgetExceededError(
            context.usage, context._budget_behind(stop), stop.message, stop=stop, partial=partial
        )
    return Halted(stop, partial=partial)


def describe(call: Call) -> ToolCallContext:
    """What hooks are told about a call."""
    record, who = call.record, call.context._run.metadata
    return ToolCallContext(
        request_id=who.request_id,
        tool_name=record.name,
        kind=record.kind,
        model=record.model or who.model,
        cost_usd=to_usd(call._held_cost) if call.hold else 0.0,
        chain_id=who.chain_id,
        node_id=record.node_id,
        org_id=who.org_id,
        team=who.team,
        service=who.service,
        user_id=who.user_id,
        tags=who.tags,
    )


def interruption(error: BaseException) -> Stop:
    """The stop of a call that something from outside broke off."""
    return Stop(StopReason.ABORTED, f"interrupted by {type(error).__name__}")


def stop_of(token: CancellationToken) -> Stop:
    """Why the token is cancelled."""
    return token.stop or Stop(StopReason.ABORTED, "cancelled")
