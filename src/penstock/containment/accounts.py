"""The arithmetic of limits.

An account is one budget: its ceilings, and what was taken from it. Accounts form a tree. A hold takes the worst case of
one call from its account and from every ancestor in one pass, or from none of them. Later it is settled at the real
cost of the call, released, or left unresolved because the bill is unknown.

No locks, no clock: the caller holds the lock of the tree and passes the time. `Ledger` is the thread-safe interface.
Every change is made at all levels or at none, even if a signal handler raises in the middle of it.

What holds at every moment, at every level: committed = spent + held + unresolved, and admission never lets `committed`,
`steps_taken`, `tokens_committed` or `api_calls` exceed its ceiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from penstock.containment.limits import NO_LIMITS, UNLIMITED, Limits
from penstock.errors import LedgerError
from penstock.money import NANOS_PER_USD, format_usd, to_usd
from penstock.stops import Stop, StopReason

HoldState = Literal["held", "settled", "released", "withdrawn", "unresolved"]

Unit = Literal["usd", "tokens"]
"""The units of which a call may request less."""

HOLD_TRANSITIONS: dict[HoldState, frozenset[HoldState]] = {
    "held": frozenset({"settled", "released", "withdrawn", "unresolved"}),
    "unresolved": frozenset({"settled", "released"}),
    "settled": frozenset(),
    "released": frozenset(),
    "withdrawn": frozenset(),
}


FIGURES = (
    "committed",
    "held",
    "unresolved",
    "steps_taken",
    "steps_done",
    "steps_given_back",
    "tokens_committed",
    "tokens_held",
    "tokens_unresolved",
    "tokens_in",
    "tokens_out",
    "api_calls",
    "retries",
)
"""The figures of an account, which are also counted at every ancestor."""


class Account:
    """One budget and what was taken from it; change it only through the functions of this module."""

    __slots__ = (
        "api_calls",
        "committed",
        "deadline_ns",
        "held",
        "limits",
        "max_api_calls",
        "max_cost",
        "max_retries",
        "max_steps",
        "max_tokens",
        "name",
        "opened_ns",
        "parent",
        "retries",
        "steps_done",
        "steps_given_back",
        "steps_taken",
        "tokens_committed",
        "tokens_held",
        "tokens_in",
        "tokens_out",
        "tokens_unresolved",
        "unresolved",
    )

    limits: Limits
    max_cost: int
    max_steps: int
    max_tokens: int
    max_api_calls: int
    max_retries: int
    deadline_ns: int

    def __init__(self, name: str, limits: Limits = NO_LIMITS, parent: Account | None = None, now_ns: int = 0) -> None:
        self.name = name
        self.parent = parent
        self.opened_ns = now_ns
        self.committed = 0
        self.held = 0
        self.unresolved = 0
        self.steps_taken = 0
        """Slots of calls that are in progress or have succeeded: every attempt takes one, a failure returns it."""
        self.steps_done = 0
        self.steps_given_back = 0
        self.tokens_committed = 0
        self.tokens_held = 0
        self.tokens_unresolved = 0
        self.tokens_in = 0
        self.tokens_out = 0
        self.api_calls = 0
        self.retries = 0
        set_limits(self, limits)

    @property
    def steps_open(self) -> int:
        """Slots of calls in progress."""
        return self.steps_taken - self.steps_done

    @property
    def attempts(self) -> int:
        """Number of admitted calls, whatever their outcome."""
        return self.steps_taken + self.steps_given_back


def set_limits(account: Account, limits: Limits) -> None:
    """Replace the ceilings of the account; what was taken stays taken."""
    try:
        _write_limits(account, limits)
    except BaseException:  # from a signal handler: all ceilings are written before it passes
        _write_limits(account, limits)
        raise


def _write_limits(account: Account, limits: Limits) -> None:
    account.limits = limits
    account.max_cost = limits.cost_nanos
    account.max_steps = limits.steps
    account.max_tokens = limits.tokens
    account.max_api_calls = limits.api_calls
    account.max_retries = limits.retries
    account.deadline_ns = account.opened_ns + limits.time_ns if limits.time_ns < UNLIMITED else UNLIMITED


def count_own_step(account: Account, counts: bool) -> None:
    """Set whether the step that owns the account takes one of its steps, or only the calls inside that step do.

    A ceiling of zero steps refuses the step itself in both cases.
    """
    steps = account.limits.steps
    account.max_steps = steps if counts or not 0 < steps < UNLIMITED else steps + 1


class Taken:
    """The amounts that one call has taken from its account and all ancestors; `take` fills them in.

    A call in progress is a subclass of this, which saves one object for each call.
    """

    __slots__ = ("_account", "_held_api_calls", "_held_cost", "_held_tokens", "_state")

    _account: Account
    _held_cost: int
    _held_tokens: int
    _held_api_calls: int
    _state: HoldState

    @property
    def state(self) -> HoldState | None:
        """State of the hold; None if nothing was taken."""
        return getattr(self, "_state", None)


class Hold(Taken):
    """The amounts that one call has taken from its account and all ancestors, until they are settled."""

    __slots__ = ()

    def __init__(self, account: Account, cost: int, tokens: int, api_calls: int) -> None:
        self._account = account
        self._held_cost = cost
        self._held_tokens = tokens
        self._held_api_calls = api_calls
        self._state = "held"

    @property
    def account(self) -> Account:
        """The account it was taken from, and with it from every ancestor."""
        return self._account

    @property
    def cost(self) -> int:
        """In nano-dollars."""
        return self._held_cost

    @property
    def tokens(self) -> int:
        """Input and output together."""
        return self._held_tokens

    @property
    def api_calls(self) -> int:
        """Number of model calls."""
        return self._held_api_calls


def hold(
    account: Account, cost: int, tokens: int, api_calls: int, now_ns: int, retry_drawn: bool = False
) -> Hold | Stop:
    """Take the worst case of one call from the account and every ancestor, or return the stop that refuses it; see
    `take`.
    """
    held = object.__new__(Hold)  # `take` fills it in
    try:
        return take(held, account, cost, tokens, api_calls, now_ns, retry_drawn) or held
    except BaseException:
        if held.state == "held":  # from a signal handler: no caller gets this hold
            withdraw(held)
        raise


def take(
    into: Taken, account: Account, cost: int, tokens: int, api_calls: int, now_ns: int, retry_drawn: bool = False
) -> Stop | None:
    """Take a step slot, `cost`, `tokens` and `api_calls` from the account and every ancestor, or return the stop.

    The amounts are written into `into`. An exhausted retry budget refuses everything except the attempt for which its
    last retry was drawn.

    The outermost account is written first. If a signal handler raises before that, no level takes anything; after that,
    the other levels are completed before the error propagates.
    """
    # A budget that is used up refuses even what seems to cost nothing, so the least that must be left is one unit.
    if (
        account.committed + (cost or 1) > account.max_cost
        or account.steps_taken >= account.max_steps
        or account.tokens_committed + (tokens or 1) > account.max_tokens
        or account.api_calls + (api_calls or 1) > account.max_api_calls
        or (account.retries >= account.max_retries and not retry_drawn)
        or now_ns >= account.deadline_ns
    ):
        return refusal(account, cost, tokens, api_calls, now_ns, retry_drawn)
    steps_taken, all_calls, parent = account.steps_taken + 1, account.api_calls + api_calls, account.parent
    if cost:
        committed, held = account.committed + cost, account.held + cost
    if tokens:
        tokens_committed, tokens_held = account.tokens_committed + tokens, account.tokens_held + tokens
    try:
        if parent is not None and take(into, parent, cost, tokens, api_calls, now_ns, retry_drawn) is not None:
            return refusal(account, cost, tokens, api_calls, now_ns, retry_drawn)
        if cost:
            account.committed = committed
            account.held = held
        if tokens:
            account.tokens_committed = tokens_committed
            account.tokens_held = tokens_held
        account.steps_taken = steps_taken
        account.api_calls = all_calls
        into._account = account
        into._held_cost = cost
        into._held_tokens = tokens
        into._held_api_calls = api_calls
        into._state = "held"
    except BaseException:
        if parent is None or into.state == "held":  # it was taken above: finish
            if cost:
                account.committed, account.held = committed, held
            if tokens:
                account.tokens_committed, account.tokens_held = tokens_committed, tokens_held
            account.steps_taken, account.api_calls, into._account = steps_taken, all_calls, account
            into._held_cost, into._held_tokens, into._held_api_calls = cost, tokens, api_calls
            into._state = "held"
        raise
    return None


def settle(
    held: Taken, cost: int, tokens_in: int, tokens_out: int, succeeded: bool, account: Account | None = None
) -> None:
    """Replace the hold by the real usage of the call, at every level. A failure returns its step slot.

    A call that was left unresolved has returned its slot already: settling its bill later takes none, successful or
    not. `account` is for the ancestors.
    """
    if held._state != "held" or not succeeded:
        _settle_otherwise(held, cost, tokens_in, tokens_out)
        return
    # As in `take`: quicker than `_change`, for every call that succeeds.
    if account is None:
        account = held._account
    held_cost, held_tokens, parent = held._held_cost, held._held_tokens, account.parent
    done = account.steps_done + 1
    if cost or held_cost:
        committed, still_held = account.committed + cost - held_cost, account.held - held_cost
    tokens = tokens_in + tokens_out
    if tokens or held_tokens:
        tokens_committed = account.tokens_committed + tokens - held_tokens
        tokens_held = account.tokens_held - held_tokens
        total_in, total_out = account.tokens_in + tokens_in, account.tokens_out + tokens_out
    try:
        if parent is not None:
            settle(held, cost, tokens_in, tokens_out, succeeded, parent)
        if cost or held_cost:
            account.committed = committed
            account.held = still_held
        if tokens or held_tokens:
            account.tokens_committed = tokens_committed
            account.tokens_held = tokens_held
            account.tokens_in = total_in
            account.tokens_out = total_out
        account.steps_done = done
        held._state = "settled"
    except BaseException:
        if parent is None or held._state == "settled":
            if cost or held_cost:
                account.committed, account.held = committed, still_held
            if tokens or held_tokens:
                account.tokens_committed, account.tokens_held = tokens_committed, tokens_held
                account.tokens_in, account.tokens_out = total_in, total_out
            account.steps_done, held._state = done, "settled"
        raise


def _settle_otherwise(held: Taken, cost: int, tokens_in: int, tokens_out: int) -> None:
    """Settle a call that has failed, or whose bill was unresolved."""
    tokens, more, more_tokens = held._held_tokens, cost - held._held_cost, tokens_in + tokens_out - held._held_tokens
    if held._state == "held":
        rest = 0, -1, 0, 1, more_tokens, -tokens, 0, tokens_in, tokens_out
        _change(held._account, held, "settled", more, -held._held_cost, *rest)
    else:
        _check_way(held, "settled")
        rest = -held._held_cost, 0, 0, 0, more_tokens, 0, -tokens, tokens_in, tokens_out
        _change(held._account, held, "settled", more, 0, *rest)


def levels_of(account: Account) -> list[Account]:
    """Return the account and every ancestor, the nearest first."""
    found = [account]
    while (above := found[-1].parent) is not None:
        found.append(above)
    return found


def _change(
    account: Account,
    taken: Taken | None,
    state: HoldState | None,
    committed: int = 0,
    held: int = 0,
    unresolved: int = 0,
    steps_taken: int = 0,
    steps_done: int = 0,
    steps_given_back: int = 0,
    tokens_committed: int = 0,
    tokens_held: int = 0,
    tokens_unresolved: int = 0,
    tokens_in: int = 0,
    tokens_out: int = 0,
    api_calls: int = 0,
    retries: int = 0,
) -> None:
    """Add these amounts to the figures of the account and of every ancestor, and set the state of the hold: all, or
    nothing.

    A signal handler may raise between any two instructions. So the new figures are computed first; once the first one
    is written, an interruption writes all of them before it propagates.
    """
    after = []
    level: Account | None = account
    while level is not None:
        after.append(
            (
                level,
                level.committed + committed,
                level.held + held,
                level.unresolved + unresolved,
                level.steps_taken + steps_taken,
                level.steps_done + steps_done,
                level.steps_given_back + steps_given_back,
                level.tokens_committed + tokens_committed,
                level.tokens_held + tokens_held,
                level.tokens_unresolved + tokens_unresolved,
                level.tokens_in + tokens_in,
                level.tokens_out + tokens_out,
                level.api_calls + api_calls,
                level.retries + retries,
            )
        )
        level = level.parent
    try:
        _write(after)
        if taken is not None and state is not None:
            taken._state = state
    except BaseException:
        _write(after)
        if taken is not None and state is not None:
            taken._state = state
        raise


def _write(after: list[Any]) -> None:
    """Write computed figures, in the order of FIGURES."""
    level: Account
    for (  # assigned from left to right: a level, then its figures
        level,  # noqa: B007
        level.committed,
        level.held,
        level.unresolved,
        level.steps_taken,
        level.steps_done,
        level.steps_given_back,
        level.tokens_committed,
        level.tokens_held,
        level.tokens_unresolved,
        level.tokens_in,
        level.tokens_out,
        level.api_calls,
        level.retries,
    ) in after:
        pass


def shrink(held: Taken, cost: int, tokens: int) -> None:
    """Reduce the hold of a call that has not begun to at most its current amounts."""
    less_cost, less_tokens = held._held_cost - cost, held._held_tokens - tokens
    if held._state != "held" or less_cost < 0 or less_tokens < 0:
        raise LedgerError(f"a hold that is {held._state} cannot be changed to {cost} and {tokens} tokens")
    given_back = object.__new__(Hold)
    try:
        _change(held._account, given_back, "held", -less_cost, -less_cost, 0, 0, 0, 0, -less_tokens, -less_tokens)
    finally:
        if given_back.state == "held":
            held._held_cost, held._held_tokens = cost, tokens


def release(held: Taken) -> None:
    """Release the hold of a call that failed and is known to have cost nothing."""
    _give_back(held, "released", ran=True)


def withdraw(held: Taken) -> None:
    """Withdraw the hold of a call that never ran: everything it had taken is returned, its attempt too."""
    _give_back(held, "withdrawn", ran=False)


def leave_unresolved(held: Taken) -> None:
    """Keep the hold of an ended call whose bill is unknown, until it is settled or released."""
    _check_way(held, "unresolved")
    cost, tokens = held._held_cost, held._held_tokens
    _change(held._account, held, "unresolved", 0, -cost, cost, -1, 0, 1, 0, -tokens, tokens)


def charge(
    account: Account,
    cost: int,
    tokens_in: int,
    tokens_out: int,
    api_calls: int,
    steps: int = 0,
    retries: int = 0,
    charged: Taken | None = None,
) -> None:
    """Count usage outside of any hold; it may exceed a ceiling, and then nothing more starts.

    `charged`, if passed, is settled by it: a handler that completes an interrupted change sees whether this was done.
    """
    tokens, counted = tokens_in + tokens_out, (tokens_in, tokens_out, api_calls, retries)
    _change(account, charged, "settled", cost, 0, 0, steps, steps, 0, tokens, 0, 0, *counted)


def put_under(account: Account, parent: Account) -> None:
    """Count what the account has taken, and takes from now on, at `parent` and its ancestors as well.

    The account must not be an ancestor of `parent`, and its previous parent must be one: nothing that was counted is
    removed anywhere. Like a charge, it may exceed a ceiling.
    """
    already = levels_of(account)
    after = [
        (level, *(getattr(level, name) + getattr(account, name) for name in FIGURES))
        for level in levels_of(parent)
        if level not in already
    ]
    try:
        _write(after)
        account.parent = parent
    except BaseException:
        _write(after)
        account.parent = parent
        raise


def draw_retry(account: Account) -> bool:
    """Draw one retry at every level; return False, and draw nothing, if a level has none left."""
    level: Account | None = account
    while level is not None:
        if level.retries >= level.max_retries:
            return False
        level = level.parent
    _change(account, None, None, retries=1)
    return True


def cost_left(account: Account) -> int:
    """Return the largest cost that could be held if all holds were released, in nano-dollars."""
    return max(0, min(map(_cost_left_here, levels_of(account))))


def has_cost_limit(account: Account) -> bool:
    """Whether the account or an ancestor has a limit on cost."""
    return any(level.max_cost < UNLIMITED for level in levels_of(account))


def has_token_limit(account: Account) -> bool:
    """Whether the account or an ancestor has a limit on tokens."""
    return any(level.max_tokens < UNLIMITED for level in levels_of(account))


def tokens_left(account: Account) -> int:
    """Return the largest number of tokens that could be held if all holds were released."""
    return max(0, min(map(_tokens_left_here, levels_of(account))))


def tightest(account: Account, unit: Unit) -> Account:
    """Return the level with the smallest rest of the unit; of several, the nearest."""
    return min(levels_of(account), key=_cost_left_here if unit == "usd" else _tokens_left_here)


def _cost_left_here(level: Account) -> int:
    return level.max_cost - level.committed + level.held


def _tokens_left_here(level: Account) -> int:
    return level.max_tokens - level.tokens_committed + level.tokens_held


def reached(level: Account, unit: Unit) -> Stop:
    """Return the stop of a ceiling that left a call less than it requested, with the current usage."""
    return _cost_stop(level, 0) if unit == "usd" else _token_stop(level, 0)


def used_up(account: Account, now_ns: int, retry_drawn: bool = False) -> Stop | None:
    """Return the stop that refuses any further call, in the order cost, steps, retries, time, tokens, api calls.

    The nearest level comes first.
    """
    return next(iter(_used_up(levels_of(account), now_ns, retry_drawn)), None)


def _used_up(levels: list[Account], now_ns: int, retry_drawn: bool) -> list[Stop]:
    checks = [_cost_used_up, _steps_used_up, _retries_used_up, _time_used_up, _tokens_used_up, _api_calls_used_up]
    if retry_drawn:
        checks.remove(_retries_used_up)
    return [stop for check in checks for level in levels if (stop := check(level, now_ns)) is not None]


def refusal(account: Account, cost: int, tokens: int, api_calls: int, now_ns: int, retry_drawn: bool = False) -> Stop:
    """Return the first stop that waiting would not remove; if there is none, the first one."""
    levels = levels_of(account)
    stops = _used_up(levels, now_ns, retry_drawn)
    stops += [stop for level in levels for stop in _do_not_fit(level, cost, tokens, api_calls)]
    assert stops, "a call was refused that nothing refuses"
    return next((stop for stop in stops if not stop.momentary), stops[0])


def fits_alone(account: Account, cost: int, tokens: int) -> bool:
    """Whether these amounts would fit at every level if all holds of calls in progress were released."""
    cost, tokens, level = cost or 1, tokens or 1, account
    while (
        level.committed - level.held + cost <= level.max_cost
        and level.tokens_committed - level.tokens_held + tokens <= level.max_tokens
    ):
        if level.parent is None:
            return True
        level = level.parent
    return False


def without_room(account: Account, cost: int, tokens: int) -> list[Account]:
    """Return the levels that have no room for these amounts now."""
    return [
        level
        for level in levels_of(account)
        if level.committed + (cost or 1) > level.max_cost or level.tokens_committed + (tokens or 1) > level.max_tokens
    ]


def is_under(account: Account, above: Account) -> bool:
    """Whether `above` is the account itself or an ancestor of it."""
    return above in levels_of(account)


def refusing(account: Account, stop: Stop) -> Account | None:
    """Return the level of the stop; budgets may share a name, so its ceiling must be the one in the stop."""
    for level in levels_of(account):
        if level.name == stop.budget and level.limits.in_unit(stop.unit or "") == stop.limit:
            return level
    return None


def _cost_used_up(level: Account, now_ns: int) -> Stop | None:
    return None if level.committed < level.max_cost else _cost_stop(level, 0)


def _cost_stop(level: Account, cost: int) -> Stop:
    spent = level.committed - level.held - level.unresolved
    parts = [f"{format_usd(spent)} spent"]
    parts += [f"{format_usd(level.held)} held"] if level.held else []
    parts += [f"{format_usd(level.unresolved)} unresolved"] if level.unresolved else []
    request = f"; the call would hold {format_usd(cost)}" if cost else ""
    return Stop(
        StopReason.BUDGET_EXCEEDED,
        f"{', '.join(parts)} of the {format_usd(level.max_cost)} of {level.name!r}{request}",
        budget=level.name,
        unit="usd",
        limit=to_usd(level.max_cost),
        used=to_usd(spent),
        held=to_usd(level.held + level.unresolved),
        asked=to_usd(cost),
        momentary=level.held > 0 and level.committed - level.held + (cost or 1) <= level.max_cost,
        unresolved=to_usd(level.unresolved),
    )


def _steps_used_up(level: Account, now_ns: int) -> Stop | None:
    if level.steps_taken < level.max_steps:
        return None
    limit = level.limits.steps
    done, under_way = level.steps_done, level.steps_open - (level.max_steps - limit)
    return _count_stop(StopReason.STEP_LIMIT_EXCEEDED, "steps", level, limit, done, under_way, 1)


def _retries_used_up(level: Account, now_ns: int) -> Stop | None:
    if level.retries < level.max_retries:
        return None
    return _count_stop(StopReason.RETRY_BUDGET_EXCEEDED, "retries", level, level.max_retries, level.retries, 0, 1)


def _time_used_up(level: Account, now_ns: int) -> Stop | None:
    if now_ns < level.deadline_ns:
        return None
    return timeout_stop(level.name, level.limits.time_ns, now_ns - level.opened_ns)


def timeout_stop(name: str, limit_ns: int, elapsed_ns: int) -> Stop:
    """Return the stop of a deadline: its owner, its length, and when it was noticed."""
    limit, elapsed = limit_ns / NANOS_PER_USD, elapsed_ns / NANOS_PER_USD
    message = f"{elapsed:.3f} s elapsed of the {limit:g} s of {name!r}"
    return Stop(StopReason.TIMEOUT, message, budget=name, unit="seconds", limit=limit, used=elapsed)


def _tokens_used_up(level: Account, now_ns: int) -> Stop | None:
    return None if level.tokens_committed < level.max_tokens else _token_stop(level, 0)


def _token_stop(level: Account, tokens: int) -> Stop:
    held = level.tokens_held + level.tokens_unresolved
    used = level.tokens_in + level.tokens_out
    stop = _count_stop(StopReason.TOKEN_LIMIT_EXCEEDED, "tokens", level, level.max_tokens, used, held, tokens)
    is_momentary = level.tokens_held > 0 and used + level.tokens_unresolved + (tokens or 1) <= level.max_tokens
    return replace(stop, momentary=is_momentary, unresolved=float(level.tokens_unresolved))


def _api_calls_used_up(level: Account, now_ns: int) -> Stop | None:
    return None if level.api_calls < level.max_api_calls else _api_call_stop(level, 1)


def _api_call_stop(level: Account, requested: int) -> Stop:
    reason = StopReason.API_CALL_LIMIT_EXCEEDED
    return _count_stop(reason, "api calls", level, level.max_api_calls, level.api_calls, 0, requested)


def _do_not_fit(level: Account, cost: int, tokens: int, api_calls: int) -> Iterator[Stop]:
    if level.committed + cost > level.max_cost:
        yield _cost_stop(level, cost)
    if level.tokens_committed + tokens > level.max_tokens:
        yield _token_stop(level, tokens)
    if level.api_calls + api_calls > level.max_api_calls:
        yield _api_call_stop(level, api_calls)


def _count_stop(
    reason: StopReason, unit: str, level: Account, limit: int, used: int, held: int, requested: int
) -> Stop:
    open_part = f" and {held} held" if held else ""
    request = f"; the call would take {requested}" if requested and used + held < limit else ""
    message = f"{used}{open_part} of the {limit} {unit} of {level.name!r} used{request}"
    return Stop(reason, message, level.name, unit, float(limit), float(used), float(held), float(requested))


def _check_way(held: Taken, to: HoldState) -> None:
    """Raise LedgerError unless the hold may change to that state."""
    if to not in HOLD_TRANSITIONS[held._state]:
        raise LedgerError(f"a hold that is {held._state} cannot become {to}")


def _give_back(held: Taken, to: HoldState, ran: bool) -> None:
    _check_way(held, to)
    cost, tokens = held._held_cost, held._held_tokens
    api_calls = 0 if ran else -held._held_api_calls
    if held._state == "held":
        back = 1 if ran else 0
        _change(held._account, held, to, -cost, -cost, 0, -1, 0, back, -tokens, -tokens, 0, 0, 0, api_calls)
    else:
        _change(held._account, held, to, -cost, 0, -cost, 0, 0, 0, -tokens, 0, -tokens)


@dataclass(frozen=True, slots=True)
class Balance:
    """The figures of one account, all from the same instant."""

    name: str
    limits: Limits
    spent_nanos: int
    held_nanos: int
    unresolved_nanos: int
    steps: int
    steps_open: int
    tokens_in: int
    tokens_out: int
    tokens_held: int
    api_calls: int
    retries: int
    attempts: int

    def __str__(self) -> str:
        """Return the account in one line, for people: what is used of each limit."""
        limits = self.limits
        money = f"{format_usd(self.spent_nanos)} spent"
        if self.held_nanos:
            money += f", {format_usd(self.held_nanos)} held"
        if self.unresolved_nanos:
            money += f", {format_usd(self.unresolved_nanos)} unresolved"
        most = "unlimited" if limits.cost_nanos == UNLIMITED else format_usd(limits.cost_nanos)
        counts = (
            ("steps", self.steps, limits.steps),
            ("tokens", self.tokens_in + self.tokens_out, limits.tokens),
            ("api calls", self.api_calls, limits.api_calls),
            ("retries", self.retries, limits.retries),
        )
        parts = (f"{used} of {'unlimited' if limit == UNLIMITED else limit} {what}" for what, used, limit in counts)
        return f"{self.name}: {money} of {most}; {', '.join(parts)}"

    @property
    def spent_usd(self) -> float:
        """The amount spent, in US dollars."""
        return to_usd(self.spent_nanos)

    @property
    def held_usd(self) -> float:
        """The amount held by calls in progress, in US dollars."""
        return to_usd(self.held_nanos)

    @property
    def unresolved_usd(self) -> float:
        """The amount still held by calls with an unknown bill, in US dollars."""
        return to_usd(self.unresolved_nanos)


class _Unfrozen:
    """A Balance that is being filled in, and then becomes one: writing frozen fields takes four times as long."""

    __slots__ = tuple(one.name for one in fields(Balance))


def balance(account: Account) -> Balance:
    """Return the current figures of the account."""
    made: Any = _Unfrozen()
    made.name = account.name
    made.limits = account.limits
    made.held_nanos = held = account.held
    made.unresolved_nanos = unresolved = account.unresolved
    made.spent_nanos = account.committed - held - unresolved
    made.steps = account.steps_done
    made.steps_open = account.steps_open
    made.tokens_in = account.tokens_in
    made.tokens_out = account.tokens_out
    made.tokens_held = account.tokens_held + account.tokens_unresolved
    made.api_calls = account.api_calls
    made.retries = account.retries
    made.attempts = account.attempts
    made.__class__ = Balance
    return made  # type: ignore[no-any-return]
