"""The keys of a database: their owners, their budgets, and the runs that pay for their requests.

A key is a token of the kind `gateway`. Its requests belong to a run: the one that the header `X-Penstock-Run` names, or
one for each key and day. The account of a run is below that of its key for the day, which `key_accounts` describes. All
accounts are in the ledger of the database, so every process that serves the same database holds from the same budgets.

A revoked or expired key is refused within `MAX_AGE_S`.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date, tzinfo

from penstock import checks, logs
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.ledger import LedgerStore
from penstock.containment.limits import NO_LIMITS, Limits
from penstock.errors import InvalidValue, LedgerError, LedgerUnavailable
from penstock.gateway.grants import Grant, UnknownCost, wrong_key
from penstock.gateway.key_accounts import GATEWAY_RUNS, KEYS, call_id_of, key_account, limit_on, money, run_account
from penstock.gateway.wires import Denied
from penstock.hosting.durability import ALL, OWNERS, TEAMS, day_of
from penstock.hosting.limits import zone_named
from penstock.hosting.tokens import TokenRecord, TokenStore, id_in
from penstock.ids import AN_ID, ID
from penstock.money import Usd
from penstock.providers.http.exchange import Terms
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.async_ledger import AsyncLedger
from penstock.runtime.durable.shared import SharedBudget
from penstock.runtime.run import RunSettings

RUN_HEADER = "x-penstock-run"
MAX_AGE_S = 0.5
"""Maximum time that a key is used before it is read again."""
MAX_RUNS = 10_000
"""Maximum number of runs kept open without a request; the least recently used ones are ended."""
MAX_WAIT_S = 30.0
"""Maximum time that a request waits for amounts held by other requests: well below the timeouts of clients."""
MAX_KEPT_CALLS = 1_000
FLOOR = 16
_NANOS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings for all keys."""

    daily_usd: Usd | None = None
    """Daily budget of all keys together."""
    owner_daily_usd: Usd | None = None
    """Daily budget of each owner, over all of their keys and runs."""
    team_daily_usd: Mapping[str, Usd] = field(default_factory=dict)
    """Daily budget of each team, over all of its members; under `*`, that of every team that is not named."""
    max_output_tokens: int = 4_096
    unknown_cost: UnknownCost = "count"
    day_zone: str = "UTC"
    """Time zone of the days of daily budgets; the same as that of the servers on this database."""
    keep_days: float = 30
    """How long the runs of keys are kept; at least two days."""

    def __post_init__(self) -> None:
        zone_named(self.day_zone)
        if not checks.number("keep_days", self.keep_days, minimum=0, maximum=1e9):
            raise InvalidValue("keep_days", self.keep_days, "more than zero")

    @property
    def zone(self) -> tzinfo:
        """The time zone `day_zone`."""
        return zone_named(self.day_zone)

    def budget_of_team(self, team: str) -> Usd | None:
        """Return the daily budget of a team; None if it has none."""
        return self.team_daily_usd.get(team, self.team_daily_usd.get("*"))


@dataclass(slots=True, eq=False)
class _OpenRun:
    """A run that this process has opened."""

    context: ExecutionContext
    shared: SharedBudget
    requests: int = 0
    """Number of requests that use it now; a run in use is not ended."""

    def release(self) -> None:
        self.requests -= 1

    async def end(self) -> None:
        self.context.end()
        self.shared.close()
        await self.shared.aflush()


class StoredKeys:
    """The keyring of a database."""

    def __init__(
        self,
        tokens: TokenStore,
        ledger: LedgerStore,
        prices: PriceBook,
        settings: GatewaySettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._tokens = tokens
        self._store = ledger
        self._ledger = AsyncLedger(ledger)
        self._prices = prices
        self._settings = settings or GatewaySettings()
        self._clock = clock
        self.mark = secrets.token_hex(6)
        """Distinguishes the calls of this process from those of others."""
        self._known: OrderedDict[str, tuple[int, TokenRecord | None]] = OrderedDict()
        self._runs: OrderedDict[str, _OpenRun] = OrderedDict()

    async def grant(self, key: str, headers: Mapping[str, str]) -> Grant:
        """Return the grant of the key; raise Denied if it is unknown, revoked or expired."""
        record = await self._authenticate(key.encode("utf-8", "surrogateescape"))
        logs.note(user=record.name, key=record.id)
        name = headers.get(RUN_HEADER) or "day"
        if not ID.fullmatch(name):
            raise Denied(400, f"X-Penstock-Run must be an id: {AN_ID}", code="invalid_run")
        settings = self._settings
        run = await self._run(record, name, day_of(self._clock.time_ns() // _NANOS_PER_MS, self._settings.zone))
        run.requests += 1
        logs.note(run_id=name)
        terms, models = Terms(run.context, settings.max_output_tokens, FLOOR), tuple(record.models or ())
        return Grant(terms, models, settings.unknown_cost, call_id_of(run.shared.prefix), run.release)

    async def _authenticate(self, secret: bytes) -> TokenRecord:
        id = id_in(secret)
        record = None if id is None else await self._read(id)
        if record is None or not record.matches(secret):
            raise Denied(401, wrong_key(secret.decode("utf-8", "replace")), code="invalid_api_key")
        if record.kind != "gateway":
            message = "this token is no key of the gateway; create one with: penstock tokens create NAME --gateway"
            raise Denied(401, message, code="invalid_api_key")
        now_ms = self._clock.time_ns() // _NANOS_PER_MS
        if not record.is_active(now_ms):
            state = "expired" if record.revoked_ms is None else "was revoked"
            raise Denied(
                401, f"this key {state}; ask the operator of the gateway for a new one", code="invalid_api_key"
            )
        if record.is_use_due(now_ms):
            self._known.pop(record.id, None)
            await self._tokens.use(record.id, now_ms=now_ms)
        return record

    async def _read(self, id: str) -> TokenRecord | None:
        now_ns = self._clock.monotonic_ns()
        known = self._known.get(id)
        if known is not None and now_ns - known[0] <= MAX_AGE_S * 1_000_000_000:
            return known[1]
        record = await self._tokens.get(id)
        self._known[id] = (now_ns, record)  # the time before reading: it may have changed while it was read
        if len(self._known) > MAX_RUNS:
            self._known.popitem(last=False)
        return record

    async def _run(self, key: TokenRecord, name: str, day: date) -> _OpenRun:
        """Return the run that pays, opened at its first request of the day."""
        account = run_account(key.id, name, day)
        found = self._runs.get(account)
        if found is None:
            await self._open_accounts(account, key, day)
            await self._end_oldest()
            found = self._runs.get(account)  # another request may have opened it meanwhile
        if found is None:
            found = self._runs[account] = self._new_run(account, key)
        self._runs.move_to_end(account)
        return found

    def _new_run(self, account: str, key: TokenRecord) -> _OpenRun:
        prefix = f"{account}/{self.mark}-{secrets.token_hex(4)}"
        shared = SharedBudget(self._store, account, prefix=prefix, owner=key.name)
        settings = RunSettings(max_wait_s=MAX_WAIT_S, max_kept_calls=MAX_KEPT_CALLS)
        run = ExecutionContext(
            name=account, prices=self._prices, settings=settings, shared_budget=shared, clock=self._clock
        )
        return _OpenRun(run, shared)

    async def _open_accounts(self, account: str, key: TokenRecord, day: date) -> None:
        parent: str | None = None
        for name, limits in await self._levels(account, key, day):
            if limits != NO_LIMITS or name.startswith((KEYS, GATEWAY_RUNS)) or await self._is_open(name):
                await self._open(name, limits, parent)
                parent = name

    async def _levels(self, account: str, key: TokenRecord, day: date) -> list[tuple[str, Limits]]:
        """Return the accounts of a request, the widest first, and their limits."""
        settings, nanos = self._settings, await limit_on(self._ledger, key, day, self._settings.zone)
        levels = [
            (f"{ALL}{day}", money(settings.daily_usd)),
            (f"{TEAMS}{key.team}:{day}", money(settings.budget_of_team(key.team))),
            (f"{OWNERS}{key.name}:{day}", money(settings.owner_daily_usd)),
            (key_account(key.id, day), NO_LIMITS if nanos is None else replace(NO_LIMITS, cost_nanos=nanos)),
            (account, NO_LIMITS),
        ]
        if not key.team:
            del levels[1]
        elif levels[1][1] != NO_LIMITS:
            # Even without a budget: an account of all users that is opened later could not be put above the team.
            await self._open(*levels[0], None)
        return levels

    async def _is_open(self, name: str) -> bool:
        """Whether a server on this database has opened a daily account: its budget applies here too."""
        try:
            await self._ledger.balance(name)
        except KeyError:  # without a budget there is no account: all keys would contend for it
            return False
        return True

    async def _open(self, name: str, limits: Limits, parent: str | None) -> None:
        try:
            await self._ledger.open_account(name, limits, parent=parent)
        except LedgerUnavailable:
            raise
        except LedgerError:  # it is there with other limits, or without a parent yet
            if limits != NO_LIMITS:
                await self._ledger.grant(name, limits)
            if parent is not None:
                await self._put_under(name, parent)

    async def _put_under(self, name: str, parent: str) -> None:
        try:
            await self._ledger.put_under(name, parent)
        except LedgerUnavailable:
            raise
        except LedgerError:
            if not parent.startswith(TEAMS):
                raise
            # The owner was in another team today: usage counted there stays there until the end of the day.

    async def _end_oldest(self) -> None:
        while len(self._runs) >= MAX_RUNS:
            idle = next((account for account, run in self._runs.items() if not run.requests), None)
            if idle is None:  # as many requests at once: other limits apply to their number
                return
            await self._runs.pop(idle).end()

    async def aclose(self) -> None:
        """End all runs, and settle the remaining calls."""
        while self._runs:
            _, run = self._runs.popitem()
            await run.end()
