"""The part of a context that admission and settlement use."""

from __future__ import annotations

from penstock.containment import accounts
from penstock.containment.accounts import Account, Balance
from penstock.containment.breaker import PolicyContext
from penstock.containment.limits import Budget, ResourceUsage
from penstock.errors import RunEnded
from penstock.money import to_usd
from penstock.runtime import metering
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.durable.shared import budget_behind
from penstock.runtime.run import Run
from penstock.stops import Stop
from penstock.tracing.record import OPEN, CallRecord, Source


class Handle:
    """A run, the account that pays, the token that stops, and the place in the tree under which calls are recorded."""

    __slots__ = ("_account", "_base", "_run", "_source", "_token", "name", "parent")

    _run: Run
    _account: Account
    _token: CancellationToken
    _base: CallRecord
    _source: Source
    name: str
    parent: Handle | None

    @property
    def balance(self) -> Balance:
        """Figures of this context's account, all read at the same moment."""
        return self._run.ledger.balance(self._account)

    @property
    def usage(self) -> ResourceUsage:
        """Usage of this context's budget: always current, and open to additions.

        Additions are charged to this budget and the outer ones. `copy.copy(ctx.usage)` keeps the current figures.
        """
        return metering.usage_of(self)

    @property
    def _own_account(self) -> Account:
        """The account of the context this is a handle of."""
        return self._account

    def _budget_behind(self, stop: Stop) -> Budget:
        """Return the ceilings of the budget that refused, as a Budget."""
        refusing = accounts.refusing(self._account, stop)
        if refusing is None and self._run.shared is not None:
            return budget_behind(stop)
        return (refusing or self._account).limits.as_budget()

    def _is_under(self, stop: Stop) -> bool:
        """Whether the refusing budget applies to this place, locally or at the store."""
        shared = self._run.shared
        is_local = accounts.refusing(self._account, stop) is not None
        return is_local or (shared is not None and shared.has_refused(stop))

    def _remember(self, stop: Stop) -> None:
        """Store the limit's refusal as the stop of this context and of the outer ones that share the budget.

        A sub-budget at the same place stops its own handle, and not the context. A refusal of the store applies to the
        whole run.
        """
        refusing, shared = accounts.refusing(self._account, stop), self._run.shared
        if refusing is None and (shared is None or not shared.has_refused(stop)):
            return
        place: Handle | None = self
        while place is not None and (refusing is None or accounts.is_under(place._own_account, refusing)):
            self._run.stops.setdefault(place._source, stop)
            place = place.parent

    def _policy_context(self) -> PolicyContext:
        account = self._account
        spent = account.committed - account.held - account.unresolved
        return PolicyContext(cost_usd=to_usd(spent), step_count=account.steps_done)

    def _now_or_end(self) -> int:
        return self._run.now() if self._base.end_seq == OPEN else self._base.ended_ns

    def _stop_after_end(self) -> Stop | None:
        """Return the stop that refuses calls after the end; None if it ended normally, below its limits."""
        raise NotImplementedError

    def _after_the_end(self, what: str) -> RunEnded:
        return RunEnded(self._run.id, f"{what} came after its end", None if self.parent is None else self._source.path)
