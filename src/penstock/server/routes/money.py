"""Money over all runs: their cost by day, model, graph, owner and node; the budgets of today; open bills.

Sums use days in UTC; budgets use the days of the server's time zone (`--day-zone`). A run counts on the day on which it
was submitted, with its recorded cost. Later spending of runs in progress is shown separately, and so are the amounts
held for unresolved bills.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Query
from pydantic import Field

from penstock.hosting.budgets import DayBudget
from penstock.hosting.durability import day_of
from penstock.hosting.ports import (
    CLAIMED,
    BillState,
    RunFilter,
    RunRecord,
    RunStatus,
    SpendingFilter,
    SpendingKey,
    SpendingSum,
)
from penstock.money import known_usd, to_usd
from penstock.runtime.billing.prices import PriceBook, Source
from penstock.server.auth import User
from penstock.server.errors import ApiError
from penstock.server.schemas import BillShown, Shown
from penstock.server.state import (
    KNOWN_QUERY,
    CurrentUser,
    QueryId,
    ServerState,
    Service,
    check_cursor,
    owner_filter,
)

router = APIRouter(prefix="/api", tags=["money"], dependencies=[KNOWN_QUERY])

Key = Literal["day", "model", "graph", "owner", "node"]
KEYS: dict[Key, tuple[SpendingKey, ...]] = {
    "day": ("day",),
    "model": ("model",),
    "graph": ("graph_id",),
    "owner": ("owner",),
    "node": ("graph_id", "node"),
}
"""Columns of each key: nodes of different graphs may have the same id."""
USUAL_DAYS = 30
MAX_DAYS = 3_660
MAX_SUMS = 5_000
MAX_OPEN_RUNS = 1_000
MAX_OWNERS = 200
MAX_MODELS = 500
EPOCH = date(1970, 1, 1)

Day = Annotated[date | None, Query(description="A day in UTC, such as 2026-11-18")]
By = Annotated[
    str,
    Query(
        max_length=60,
        description="What to sum by: any of day, model, graph, owner and node, with commas between them",
        examples=["day,model"],
    ),
]


class MoneySum(Shown):
    """The usage of a group of runs; keys that it was not grouped by are null."""

    day: date | None = None
    model: str | None = Field(None, description="Empty for costs without a model, such as tools")
    graph_id: str | None = None
    owner: str | None = None
    node: str | None = Field(None, description="Node of the graph; empty for costs known of runs as a whole only")
    runs: int | None = Field(description="Null in sums by model or node, where a run counts in several")
    calls: int = Field(description="Number of model calls")
    cost_usd: float | None = Field(
        description="A lower bound if there are `unknown_costs`; null if nothing of it is known"
    )
    cost_nanos: int
    tokens_in: int
    tokens_out: int
    unknown_costs: int = Field(description="Number of calls that were billed at an unknown cost")


class MoneyInProgress(Shown):
    """Runs in progress: their spending beyond their recorded cost, and the amount held for their calls."""

    runs: int
    spent_usd: float
    held_usd: float


class MoneyUnresolved(Shown):
    """Runs with unresolved bills, and the amount held for these: it is in no cost, and counts against budgets."""

    runs: int
    held_usd: float


class MoneyShown(Shown):
    """The cost of runs between two days, both included."""

    by: list[Key]
    since: date
    until: date
    time_zone: Literal["UTC"]
    sums: list[MoneySum]
    is_truncated: bool = Field(description="Whether there are more sums; the total has all of them")
    total: MoneySum
    in_progress: MoneyInProgress
    unresolved: MoneyUnresolved


class DayBudgetShown(Shown):
    """A daily budget and its use; `limit_usd` and `left_usd` are null if it is unlimited."""

    level: Literal["all", "team", "owner"]
    name: str = Field(description="The team or the owner; empty for the budget of all")
    limit_usd: float | None
    spent_usd: float
    held_usd: float = Field(description="Held for calls in progress")
    unresolved_usd: float = Field(description="Held for unresolved bills")
    left_usd: float | None

    @classmethod
    def of(cls, budget: DayBudget) -> DayBudgetShown:
        """Convert a budget."""
        usd = {
            name: None if nanos is None else to_usd(nanos)
            for name, nanos in (("limit_usd", budget.limit_nanos), ("left_usd", budget.left_nanos))
        }
        return cls(
            level=budget.level,
            name=budget.name,
            spent_usd=to_usd(budget.spent_nanos),
            held_usd=to_usd(budget.held_nanos),
            unresolved_usd=to_usd(budget.unresolved_nanos),
            **usd,
        )


class BudgetsOfDay(Shown):
    """The budgets of today that apply to you; admins see those of everybody."""

    day: date
    now_ms: int
    resets_ms: int = Field(description="When the day ends, and the budgets of the next one apply")
    budgets: list[DayBudgetShown]


class PriceFigures(Shown):
    """The price of a model, in US dollars per million tokens; null where there is none."""

    source: Source = Field(description="assumed: without a price of its own, charged at the upper bound that was set")
    input_usd_per_mtok: float | None
    output_usd_per_mtok: float | None
    cached_input_usd_per_mtok: float | None
    request_usd: float
    has_tiers: bool = Field(description="Whether calls with much input have another price")

    @classmethod
    def of(cls, prices: PriceBook, name: str) -> PriceFigures:
        """Look up the price in force for the model of that name at its provider."""
        price = prices.price_of(name) or prices.assumed

        def usd(field: str) -> float | None:
            amount = None if price is None else getattr(price, field)
            return None if amount is None else float(amount)

        return cls(
            source=prices.source_of(name),
            input_usd_per_mtok=usd("input_usd_per_mtok"),
            output_usd_per_mtok=usd("output_usd_per_mtok"),
            cached_input_usd_per_mtok=usd("cached_input_usd_per_mtok"),
            request_usd=usd("request_usd") or 0.0,
            has_tiers=price is not None and bool(price.tiers),
        )


class PriceShown(PriceFigures):
    """The price of a model that graphs can name or that was used."""

    model: str = Field(description="The model's name at its provider, as in the costs by model")
    offered_as: list[str] = Field(description="Ids under which graphs on this server can name it")
    provider: str | None


class PriceList(Shown):
    """The prices in force: of the models that graphs can name, and of those used in the last 30 days."""

    prices: list[PriceShown]
    unknown: Literal["refuse", "assume", "count"] = Field(description="What happens to calls of models without a price")


class UnknownCost(Shown):
    """A model whose calls in a run were billed at an unknown cost."""

    node: str
    model: str
    calls: int


class RunBills(Shown):
    """A run with open bills."""

    run_id: str
    graph_id: str
    owner: str
    status: RunStatus
    created_ms: int
    ended_ms: int | None
    unresolved_usd: float
    unknown_costs: int
    bills: list[BillShown] = Field(description="The unresolved bills, oldest first")
    unknown: list[UnknownCost] = Field(description="Where the calls of unknown cost were made")


class BillPage(Shown):
    """Runs with open bills, newest first."""

    runs: list[RunBills]
    next: str | None = None


@router.get("/money")
async def money(
    service: Service,
    user: CurrentUser,
    by: By = "day",
    since: Day = None,
    until: Day = None,
    owner: QueryId = None,
    graph_id: QueryId = None,
) -> MoneyShown:
    """Sum the costs of your own runs, of the last 30 days unless you set days; admins see all runs.

    The sums outlive the runs: removed runs still count.
    """
    keys = _keys(by)
    today = day_of(service.now_ms())
    last = until or today
    first = since or max(EPOCH, last - timedelta(days=min(USUAL_DAYS, last.toordinal()) - 1))
    _check_days(first, last)
    whose = owner_filter(user, owner)
    matching = SpendingFilter((first - EPOCH).days, (last - EPOCH).days, whose, graph_id)
    columns = list(dict.fromkeys(column for key in keys for column in KEYS[key]))
    spending = service.stores.spending
    sums = await spending.sums(columns, matching, limit=MAX_SUMS + 1)
    total = next(iter(await spending.sums((), matching)), SpendingSum())
    by_run = not {"model", "node"} & {*keys}
    return MoneyShown(
        by=keys,
        since=first,
        until=last,
        time_zone="UTC",
        sums=[_shown(one, by_run) for one in sums[:MAX_SUMS]],
        is_truncated=len(sums) > MAX_SUMS,
        total=_shown(total, True),
        in_progress=await _in_progress(service, first, last, whose, graph_id),
        unresolved=await _unresolved(service, first, last, whose, graph_id),
    )


@router.get("/budgets")
async def budgets(service: Service, user: CurrentUser) -> BudgetsOfDay:
    """Return today's budgets: the budget of all users and your own; admins get those of every owner and team."""
    return await budgets_for(service, user)


async def budgets_for(service: ServerState, user: User) -> BudgetsOfDay:
    """Return the budgets of today that the user may see."""
    now_ms = service.now_ms()
    zone = service.host.settings.zone
    day = day_of(now_ms, zone)
    owners, teams = [user.name], list[str]()
    if user.is_admin:
        keys = await service.stores.tokens.list(kinds=("gateway",), limit=MAX_OWNERS)
        owners = await _owners(service, day, {key.name for key in keys})
        teams = sorted({key.team for key in keys if key.team})
    found = await service.host.budgets_of_day(day, owners, teams)
    midnight = datetime.combine(day + timedelta(days=1), datetime.min.time(), zone)
    return BudgetsOfDay(
        day=day,
        now_ms=now_ms,
        resets_ms=round(midnight.timestamp() * 1_000),
        budgets=[DayBudgetShown.of(budget) for budget in found],
    )


@router.get("/prices")
async def prices(service: Service, user: CurrentUser) -> PriceList:
    """List the prices in force for the models of this server, and for those that your runs used in the last 30 days."""
    first = (day_of(service.now_ms()) - EPOCH).days - USUAL_DAYS + 1
    matching = SpendingFilter(since_day=first, owner=owner_filter(user, None))
    used = await service.stores.spending.sums(["model"], matching, limit=MAX_MODELS)
    names = {one.model for one in used if one.model}
    shown = await asyncio.to_thread(_prices, service.host.prices, service.graphs.models, names)
    return PriceList(prices=shown, unknown=service.host.prices.unknown)


@router.get("/bills")
async def bills(
    service: Service,
    user: CurrentUser,
    state: Annotated[
        BillState, Query(description="unresolved: money is held for them; unknown: their cost is in no sum")
    ] = "unresolved",
    owner: QueryId = None,
    before: QueryId = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> BillPage:
    """List your own runs with open bills, newest first; admins see all. A run shows them once it has ended or rests."""
    runs = service.stores.runs
    if before is not None:
        await check_cursor("run", runs.get(before), user)
    found = await runs.list(
        owner=owner_filter(user, owner), before=before, limit=limit + 1, matching=RunFilter(bills=state)
    )
    shown = [await _bills_of(service, run) for run in found[:limit]]
    return BillPage(runs=shown, next=shown[-1].run_id if len(found) > limit else None)


def _prices(book: PriceBook, offered: Mapping[str, Any], used: set[str]) -> list[PriceShown]:
    ids: dict[str, list[str]] = {name: [] for name in used}
    providers: dict[str, str | None] = {}
    for id, model in sorted(offered.items()):
        name = name_of(id, model)
        ids.setdefault(name, []).append(id)
        providers[name] = provider_of(model)
    return [
        PriceShown(**dict(PriceFigures.of(book, name)), model=name, offered_as=ids[name], provider=providers.get(name))
        for name in sorted(ids)
    ]


def name_of(id: str, model: object) -> str:
    """Return the name of an offered model at its provider, by which it is priced."""
    return str(getattr(model, "name", id))


def provider_of(model: object) -> str | None:
    """Return the provider of an offered model, without the address of its server; None for one of this server."""
    return str(getattr(model, "provider", "") or "").partition(":")[0] or None


def _keys(by: str) -> list[Key]:
    known = get_args(Key)
    names = [name.strip() for name in by.split(",")]
    for name in names:
        if name not in known:
            message = f"by must be any of {', '.join(known)}, with commas between them, not {name[:40]!r}"
            raise ApiError(422, message, path="query.by")
    if len({*names}) < len(names):
        raise ApiError(422, "by has a key twice; send each once", path="query.by")
    return [key for name in names for key in known if key == name]


def _check_days(first: date, last: date) -> None:
    if last < first:
        message = f"since is {first}, which is later than until, {last}; send the earlier day as since"
        raise ApiError(422, message, path="query.since")
    if (last - first).days >= MAX_DAYS:
        raise ApiError(422, f"at most {MAX_DAYS} days can be summed at once; send a later since", path="query.since")


def _shown(one: SpendingSum, by_run: bool) -> MoneySum:
    fields: dict[str, Any] = one._asdict()
    fields["day"] = None if one.day is None else EPOCH + timedelta(days=one.day)
    fields["runs"] = one.runs if by_run else None
    return MoneySum(**fields, cost_usd=known_usd(one.cost_nanos, one.unknown_costs))


def _submitted_between(first: date, last: date) -> tuple[int, int]:
    """Return the start of the first day and the end of the last one, in milliseconds."""
    days = (first - EPOCH).days, (last - EPOCH).days + 1
    return days[0] * 86_400_000, days[1] * 86_400_000


async def _in_progress(
    service: ServerState, first: date, last: date, owner: str | None, graph_id: str | None
) -> MoneyInProgress:
    since_ms, until_ms = _submitted_between(first, last)
    runs: Sequence[RunRecord] = await service.stores.runs.list(
        owner=owner,
        statuses=CLAIMED,
        graph_id=graph_id,
        limit=MAX_OPEN_RUNS,
        matching=RunFilter(since_ms=since_ms, until_ms=until_ms),
    )
    live = await service.host.live_usage(runs)
    known = {run.id: run.cost_nanos for run in runs}
    spent = sum(max(0, balance.spent_nanos - known[run_id]) for run_id, balance in live.items())
    held = sum(balance.held_nanos for balance in live.values())
    return MoneyInProgress(runs=len(runs), spent_usd=to_usd(spent), held_usd=to_usd(held))


async def _unresolved(
    service: ServerState, first: date, last: date, owner: str | None, graph_id: str | None
) -> MoneyUnresolved:
    since_ms, until_ms = _submitted_between(first, last)
    runs: Sequence[RunRecord] = await service.stores.runs.list(
        owner=owner,
        graph_id=graph_id,
        limit=MAX_OPEN_RUNS,
        matching=RunFilter(since_ms=since_ms, until_ms=until_ms, bills="unresolved"),
    )
    return MoneyUnresolved(runs=len(runs), held_usd=to_usd(sum(run.unresolved_nanos for run in runs)))


async def _owners(service: ServerState, day: date, of_keys: set[str]) -> list[str]:
    """Return the owners who have spent on the day, those of active runs, and the owners of gateway keys."""
    number = (day - EPOCH).days
    spent = await service.stores.spending.sums(["owner"], SpendingFilter(number, number), limit=MAX_OWNERS)
    running = await service.stores.runs.list(statuses=CLAIMED, limit=MAX_OWNERS)
    names = {row.owner for row in spent if row.owner is not None} | {run.owner for run in running}
    return sorted(names | of_keys)[:MAX_OWNERS]


async def _bills_of(service: ServerState, run: RunRecord) -> RunBills:
    bills = await service.host.bills(run.id) if run.unresolved_nanos else []
    shares = await service.stores.spending.of(run.id) if run.unknown_costs else []
    return RunBills(
        run_id=run.id,
        graph_id=run.graph_id,
        owner=run.owner,
        status=run.status,
        created_ms=run.created_ms,
        ended_ms=run.ended_ms,
        unresolved_usd=to_usd(run.unresolved_nanos),
        unknown_costs=run.unknown_costs,
        bills=[BillShown.of(bill) for bill in bills],
        unknown=[
            UnknownCost(node=share.node, model=share.model, calls=share.unknown_costs)
            for share in shares
            if share.unknown_costs
        ],
    )
