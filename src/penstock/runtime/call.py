"""A call: its specification before it runs, and its state while and after it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from penstock.containment import accounts
from penstock.containment.accounts import Account, Taken
from penstock.containment.limits import BudgetExceededError
from penstock.containment.safety import Decision, ToolCallContext
from penstock.containment.shield import Verdict
from penstock.errors import CancelledError, Halted, LedgerError
from penstock.money import Usd, to_usd
from penstock.runtime.billing.usage import Usage
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.durable.shared import key_of, note_late_bill, note_unknown
from penstock.runtime.handle import Handle
from penstock.runtime.locking import all_or_nothing
from penstock.runtime.metering import measure
from penstock.runtime.streams import Output
from penstock.stops import LIMIT_REASONS, Stop, StopReason
from penstock.tracing.lifecycle import CallKind
from penstock.tracing.record import CallRecord

Work = Callable[..., Any]
"""The function of a call."""


@dataclass(slots=True)
class CallSpec:
    """The specification of a call. Calls share it, so it is never changed.

    It is not frozen because creating a frozen one takes as long as a third of a call.
    """

    kind: CallKind
    name: str
    hold_nanos: int | None = None
    """Worst-case cost in nano-dollars, held while it runs; None if unknown."""
    model: str | None = None
    hold_tokens: int | None = None
    """Maximum number of tokens it can use; None if unknown."""
    timeout_s: float | None = None
    """Time limit of each attempt."""
    degraded: Work | None = None
    """The function that runs instead when a hook decides DEGRADE; None runs the call as it is."""
    metadata: Mapping[str, Any] | None = None
    """Metadata of its record; shared, not copied."""


blank = object.__new__
"""`blank(Call)` is a call that admission fills in."""

running_call: ContextVar[Call | None] = ContextVar("penstock_call", default=None)
"""The call that is being executed in this context; calls made by its function are its children."""

NOT_WAITING: object = None

ALLOW, RETRY = Decision.ALLOW, Decision.RETRY
"""Used in every call: looking up an enum member costs as much as a function call."""


class Call(Taken):
    """One call and its outcome. The call object itself is its hold (`Taken`)."""

    __slots__ = (
        "_outer_call",
        "began",
        "billed_below",
        "context",
        "decision",
        "degraded",
        "error",
        "failed_below",
        "hinted",
        "parent_call",
        "permit",
        "record",
        "stop",
        "stream",
        "token",
        "unknown",
        "usage",
        "value",
        "waiter",
    )

    context: Handle
    record: CallRecord
    hinted: bool
    token: CancellationToken
    parent_call: Call | None
    """The call of the same run that made this one."""
    _outer_call: Call
    """The call that made this one, if it is of another run with the same ledger; otherwise not set."""
    billed_below: list[Any] | None
    """Values whose usage a child call has paid for: returning one costs nothing more."""
    failed_below: BaseException | None
    """The last error of a child call: raising it again is neither billed nor retried again."""
    decision: Decision
    value: Any
    error: BaseException | None
    stop: Stop | None
    """Why the call did not run, or was stopped; None if nothing stopped it."""
    degraded: Verdict | None
    """Set when a hook allowed the call in degraded form only."""
    usage: Usage | None
    """Usage that the function itself reported while it ran."""
    permit: int | None
    stream: Output | None
    """Returns the output so far, if the call streams; kept for `partial` when the call is stopped."""
    began: bool
    """Whether its function may have run."""
    waiter: object
    """Its place among the calls that wait for room, while it waits; see `waiting`."""
    unknown: bool
    """Whether it was billed at an unknown cost; while that is so, the run's cost is a lower bound."""

    def __init__(
        self,
        context: Handle,
        record: CallRecord,
        hinted: bool,
        token: CancellationToken,
        parent_call: Call | None = None,
    ) -> None:
        self.context = context
        self.record = record
        self.hinted = hinted
        self.token = token
        self.parent_call = parent_call
        self.decision = ALLOW
        self.unknown = self.began = False
        self.waiter = None
        self.value = self.error = self.stop = self.degraded = self.usage = self.permit = self.stream = None
        self.billed_below = self.failed_below = None

    @property
    def hold(self) -> Taken | None:
        """The call's hold; None if it was refused before it held anything."""
        return None if self.state is None else self

    @property
    def is_unpriced(self) -> bool:
        """Whether it may be billed although nothing is held for it: a model call of unknown price."""
        return self.record.kind == "llm" and not self.hinted and self._held_cost == 0

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1; its record has it too, from the second on."""
        attempt: int = (self.record.metadata or {}).get("attempt", 1)
        return attempt

    @property
    def node_id(self) -> str:
        """The id of this call in the run's graph."""
        return self.record.node_id

    @property
    def cost_usd(self) -> float | None:
        """The settled cost of the call; None if it was billed at an unknown cost."""
        if self.unknown:
            return None
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
        """Settle a call with an unknown bill at its actual cost; raise LedgerError if its bill is known."""
        self._settle(Usage.of(cost_usd=cost_usd, input_tokens=input_tokens, output_tokens=output_tokens))

    def _settle(self, usage: Usage, record: Callable[[], None] | None = None) -> None:
        """Settle the bill; `record` adds the person who settled it, in the same change, and may be called again."""
        run, cost, tokens = self.context._run, usage.cost_nanos or 0, (usage.input_tokens, usage.output_tokens)
        now_ns = run.now()
        paid: Taken | None = None
        unknown_costs, was_unknown = 0, False
        is_open = run.shared is not None and run.shared.is_open(key_of(run.shared, self))

        def change() -> None:
            nonlocal paid, unknown_costs, was_unknown
            if paid is None:
                if self.state != "unresolved" and not self.unknown:
                    raise LedgerError(f"the bill of call {self.node_id} is not open")
                unknown_costs, was_unknown = run.unknown_costs - self.unknown, self.unknown
                paid = self if self.state == "unresolved" else Taken()
            if paid.state == "unresolved":
                accounts.settle(self, cost, *tokens, False)
            elif paid.state is None:
                accounts.charge(self.context._account, cost, *tokens, 0, charged=paid)
            run.unknown_costs, self.unknown = unknown_costs, False
            run.graph.settle_late(self.record, now_ns, cost, *tokens)
            if record is not None:
                record()
            if run.queues:
                run.room.changed(now_ns)

        def report() -> None:
            if run.shared is not None and paid is not None:
                if was_unknown:
                    note_unknown(run.shared, self)
                note_late_bill(run.shared, self, cost, *tokens, is_open)

        all_or_nothing(run.lock, change, report)

    def release(self) -> None:
        """Release the hold of a call with an unresolved bill, which cost nothing; LedgerError if it has none."""
        self._release()

    def _release(self, record: Callable[[], None] | None = None) -> None:
        """Release the hold; `record` adds the person who released it, in the same change, and may be called again."""
        run = self.context._run
        now_ns = run.now()
        was_open = False
        is_open = run.shared is not None and run.shared.is_open(key_of(run.shared, self))

        def change() -> None:
            nonlocal was_open
            if not was_open and self.state != "unresolved":
                raise LedgerError(f"the bill of call {self.node_id} is not open")
            was_open = True
            if self.state == "unresolved":
                accounts.release(self)
            if record is not None:
                record()
            if run.queues:
                run.room.changed(now_ns)

        def report() -> None:
            if run.shared is not None and was_open:
                note_late_bill(run.shared, self, 0, 0, 0, is_open)

        all_or_nothing(run.lock, change, report)

    def result(self) -> Any:
        """Return the value; raise the error or the stop if the call has none."""
        if self.stop is not None:
            raise self.stop_error() from self.error
        if self.error is not None:
            raise self.error
        return self.value

    def stop_error(self) -> Halted | CancelledError:
        """Return the exception for the call's stop; a cancel has the output of this call alone, if it streams."""
        assert self.stop is not None
        error = stopped(self.context, self.stop)
        output = None if self.stream is None else self.stream()
        if output is not None and isinstance(error, CancelledError):
            error.partial = {self.record.result_name: output}
        return error


def stopped(context: Handle, stop: Stop) -> Halted | CancelledError:
    """Return the exception for `stop`, with the usage and the partial results."""
    if stop.reason is StopReason.ABORTED:
        return CancelledError(stop.message, stop=stop)
    partial = context._run.partial_results()
    if stop.reason in LIMIT_REASONS:
        return BudgetExceededError(
            measure(context), context._budget_behind(stop), stop.message, stop=stop, partial=partial
        )
    return Halted(stop, partial=partial)


def describe(call: Call, tokens_in: int | None = None, tokens_out: int | None = None) -> ToolCallContext:
    """Return the call as hooks see it."""
    record, who = call.record, call.context._run.metadata
    # Without `__init__`, which sets and checks field by field in each call; other fields have their defaults.
    about = object.__new__(ToolCallContext)
    vars(about).update(
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
        metadata={},
        tokens_in=tokens_in,
        tokens_out=tokens_out,
    )
    return about


def draw_retry(account: Account, record: CallRecord) -> bool:
    """Take one retry from every level and count it for the record; False if none is left. The caller holds the lock."""
    before, counted = account.retries, record.extras._replace(retries=record.retries + 1)
    drawn = False
    try:
        drawn = accounts.draw_retry(account)
        if drawn:
            record.extras = counted
    except BaseException:
        if account.retries > before:
            record.extras = counted
        raise
    return drawn


def interruption(error: BaseException) -> Stop:
    """Return the stop of a call that was interrupted from outside."""
    return Stop(StopReason.ABORTED, f"interrupted by {type(error).__name__}")


def stop_of(token: CancellationToken) -> Stop:
    """Return the stop that cancelled the token."""
    return token.stop or Stop(StopReason.ABORTED, "cancelled")
