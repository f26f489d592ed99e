"""The arithmetic of limits.

An account is one budget: its ceilings, and what was taken from it. Accounts form a tree. A hold takes the worst case
of one call from its account and from every ancestor in one pass, or from none of them; later it is settled at what
the call really cost, released, or left unresolved because nobody knows the bill.

No locks, no clock: whoever calls holds the lock of the tree and says what time it is. `Ledger` is the safe way in.

What holds at every moment, at every level: committed = spent + held + unresolved, and admission never lets `committed`,
`steps_taken`, `tokens_committed` or `api_calls` pass its ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from penstock.containment.limits import NO_LIMITS, UNLIMITED, Limits
from penstock.errors import LedgerError
from penstock.money import NANOS_PER_USD, format_usd, to_usd
from penstock.stops import Stop, StopReason

HoldState = Literal["held", "settled", "released", "withdrawn", "unresolved"]

Unit = Literal["usd", "tokens"]
"""What a call may do with less of."""

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
"""What is counted of an account, and so of every one above it."""


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
        """Slots of calls that are under way or have succeeded: every attempt takes one, what fails gives it back."""
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
        """Slots of calls that are under way."""
        return self.steps_taken - self.steps_done

    @property
    def attempts(self) -> int:
        """Calls that were let through, whatever came of them."""
        return self.steps_taken + self.steps_given_back


def set_limits(account: Account, limits: Limits) -> None:
    """Give the account these ceilings from now on; what was taken stays taken."""
    account.limits = limits
    account.max_cost = limits.cost_nanos
    account.max_steps = limits.steps
    account.max_tokens = limits.tokens
    account.max_api_calls = limits.api_calls
    account.max_retries = limits.retries
    account.deadline_ns = account.opened_ns + limits.time_ns if limits.time_ns < UNLIMITED else UNLIMITED


class Taken:
    """What one call has taken from its account and all ancestors; `take` fills it in.

    A call on its way is one of these itself: that is one object less for each of them.
    """

    __slots__ = ("_account", "_held_api_calls", "_held_cost", "_held_tokens", "_state")

    _account: Account
    _held_cost: int
    _held_tokens: int
    _held_api_calls: int
    _state: HoldState

    @property
    def state(self) -> HoldState | None:
        """What became of it; None if nothing was ever taken."""
        return getattr(self, "_state", None)


class Hold(Taken):
    """What one call has taken from its account and all ancestors, until it is settled."""

    __slots__ = ()

    def __init__(self, account: Account, cost: int, tokens: int, api_calls: int) -> None:
        self._account = account
        self._held_cost = cost
        self._held_tokens = tokens
        self._held_api_calls = api_calls
        self._state = "held"

    @property
    def account(self) -> Account:
        """The account it was taken from, and with it from every one above."""
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
        """Calls of a model."""
        return self._held_api_calls


def hold(
    account: Account, cost: int, tokens: int, api_calls: int, now_ns: int, retry_drawn: bool = False
) -> Hold | Stop:
    """Take the worst case of one call from the account and every ancestor, or say what refuses; see `take`."""
    held = Hold(account, cost, tokens, api_calls)
    return take(held, account, cost, tokens, api_calls, now_ns, retry_drawn) or held


def take(
    into: Taken, account: Account, cost: int, tokens: int, api_calls: int, now_ns: int, retry_drawn: bool = False
) -> Stop | None:
    """Take a step slot, `cost`, `tokens` and `api_calls` from the account and every ancestor, or say what refuses.

    What was taken is written into `into`. A used-up retry budget refuses everything except the attempt its last retry
    was drawn for.
    """
    # A budget that is used up refuses even what seems to cost nothing, so the least that must be left is one unit.
    least_cost = cost or 1
    least_tokens = tokens or 1
    least_calls = api_calls or 1
    level: Account | None = account
    while level is not None:
        if (
            level.committed + least_cost > level.max_cost
            or level.steps_taken >= level.max_steps
            or level.tokens_committed + least_tokens > level.max_tokens
            or level.api_calls + least_calls > level.max_api_calls
            or (level.retries >= level.max_retries and not retry_drawn)
            or now_ns >= level.deadline_ns
        ):
            return _refusal(account, cost, tokens, api_calls, now_ns, retry_drawn)
        level = level.parent
    level = account
    while level is not None:
        level.steps_taken += 1
        if cost:
            level.committed += cost
            level.held += cost
        if tokens:
            level.tokens_committed += tokens
            level.tokens_held += tokens
        if api_calls:
            level.api_calls += api_calls
        level = level.parent
    into._account = account
    into._held_cost = cost
    into._held_tokens = tokens
    into._held_api_calls = api_calls
    into._state = "held"
    return None


def settle(held: Taken, cost: int, tokens_in: int, tokens_out: int, succeeded: bool) -> None:
    """Replace the hold by what the call really used, at every level. A failure gives its step slot back.

    A call that was left unresolved has given its slot back already: settling its bill later takes none, success or not.
    """
    was_held = held._state == "held"
    if was_held:
        held._state = "settled"
    else:
        _advance(held, "settled")
    held_cost, held_tokens, tokens = held._held_cost, held._held_tokens, tokens_in + tokens_out
    level: Account | None = held._account
    while level is not None:
        if was_held:
            if succeeded:
                level.steps_done += 1
            else:
                level.steps_taken -= 1
                level.steps_given_back += 1
        if cost or held_cost:
            level.committed += cost - held_cost
            if was_held:
                level.held -= held_cost
            else:
                level.unresolved -= held_cost
        if tokens or held_tokens:
            level.tokens_committed += tokens - held_tokens
            level.tokens_in += tokens_in
            level.tokens_out += tokens_out
            if was_held:
                level.tokens_held -= held_tokens
            else:
                level.tokens_unresolved -= held_tokens
        level = level.parent


def shrink(held: Taken, cost: int, tokens: int) -> None:
    """The call, which has not begun, does with less than it took; it was to be held, and to be no more than that."""
    less_cost, less_tokens = held._held_cost - cost, held._held_tokens - tokens
    if held._state != "held" or less_cost < 0 or less_tokens < 0:
        raise LedgerError(f"a hold that is {held._state} cannot be made to be of {cost} and {tokens} tokens")
    held._held_cost, held._held_tokens = cost, tokens
    level: Account | None = held._account
    while level is not None:
        level.committed -= less_cost
        level.held -= less_cost
        level.tokens_committed -= less_tokens
        level.tokens_held -= less_tokens
        level = level.parent


def release(held: Taken) -> None:
    """The call failed and is known to have cost nothing."""
    _give_back(held, _advance(held, "released"), ran=True)


def withdraw(held: Taken) -> None:
    """The call never ran: everything it had taken is given back, its attempt too."""
    _give_back(held, _advance(held, "withdrawn"), ran=False)


def leave_unresolved(held: Taken) -> None:
    """The call is over and nobody knows its bill: the hold stays taken until somebody settles or releases it."""
    _advance(held, "unresolved")
    level: Account | None = held._account
    while level is not None:
        level.held -= held._held_cost
        level.unresolved += held._held_cost
        level.tokens_held -= held._held_tokens
        level.tokens_unresolved += held._held_tokens
        level.steps_taken -= 1
        level.steps_given_back += 1
        level = level.parent


def charge(account: Account, cost: int, tokens_in: int, tokens_out: int, api_calls: int, steps: int = 0) -> None:
    """Count what was spent and done outside any hold; it may pass a ceiling, and then nothing more starts."""
    level: Account | None = account
    while level is not None:
        level.committed += cost
        level.tokens_committed += tokens_in + tokens_out
        level.tokens_in += tokens_in
        level.tokens_out += tokens_out
        level.api_calls += api_calls
        level.steps_taken += steps
        level.steps_done += steps
        level = level.parent


def put_under(account: Account, parent: Account) -> None:
    """Count what the account has taken, and takes from now on, at `parent` and above it as well.

    The account is not above `parent`, and what it was under is: nothing that was counted anywhere is taken back. As a
    charge does, it may pass a ceiling.
    """
    already = _levels(account)
    for level in _levels(parent):
        if level not in already:
            for name in FIGURES:
                setattr(level, name, getattr(level, name) + getattr(account, name))
    account.parent = parent


def draw_retry(account: Account) -> bool:
    """Take one from the retry budget of every level; False, and nothing is taken, if one of them has none left."""
    level: Account | None = account
    while level is not None:
        if level.retries >= level.max_retries:
            return False
        level = level.parent
    level = account
    while level is not None:
        level.retries += 1
        level = level.parent
    return True


def has_room(account: Account, cost: int, tokens: int) -> bool:
    """Whether so much could be held now, as far as cost and tokens go."""
    level: Account | None = account
    while level is not None:
        if level.committed + cost > level.max_cost or level.tokens_committed + tokens > level.max_tokens:
            return False
        level = level.parent
    return True


def cost_left(account: Account) -> int:
    """The largest cost that could be held now, in nano-dollars."""
    left = UNLIMITED
    level: Account | None = account
    while level is not None:
        left = min(left, level.max_cost - level.committed)
        level = level.parent
    return max(left, 0)


def tokens_left(account: Account) -> int:
    """The most tokens that could be held now."""
    left = UNLIMITED
    level: Account | None = account
    while level is not None:
        here = level.max_tokens - level.tokens_committed
        if here < left:
            left = here
        level = level.parent
    return left if left > 0 else 0


def tightest(account: Account, unit: Unit) -> Account:
    """The level that has least left of it; of several, the nearest."""
    return min(_levels(account), key=_cost_left_here if unit == "usd" else _tokens_left_here)


def _cost_left_here(level: Account) -> int:
    return level.max_cost - level.committed


def _tokens_left_here(level: Account) -> int:
    return level.max_tokens - level.tokens_committed


def reached(level: Account, unit: Unit) -> Stop:
    """The stop of a ceiling that left a call less than it wanted, by what is used of it now."""
    return _cost_stop(level, 0) if unit == "usd" else _token_stop(level, 0)


def used_up(account: Account, now_ns: int, retry_drawn: bool = False) -> Stop | None:
    """What refuses anything more, in the order cost, steps, retries, time, tokens, api calls.

    The nearest level first.
    """
    levels = _levels(account)
    for check in (_cost_used_up, _steps_used_up, _retries_used_up, _time_used_up, _tokens_used_up, _api_calls_used_up):
        if check is _retries_used_up and retry_drawn:
            continue
        for level in levels:
            if (stop := check(level, now_ns)) is not None:
                return stop
    return None


def _refusal(account: Account, cost: int, tokens: int, api_calls: int, now_ns: int, retry_drawn: bool) -> Stop:
    stop = used_up(account, now_ns, retry_drawn)
    for level in _levels(account):
        stop = stop or _does_not_fit(level, cost, tokens, api_calls)
    assert stop is not None, "a call was refused that nothing refuses"
    return stop


def _levels(account: Account) -> list[Account]:
    levels = [account]
    while (above := levels[-1].parent) is not None:
        levels.append(above)
    return levels


def is_under(account: Account, above: Account) -> bool:
    """Whether what `account` takes is taken from `above` too."""
    return above in _levels(account)


def refusing(account: Account, stop: Stop) -> Account | None:
    """The level that the stop came from; budgets may share a name, so its ceiling has to be the one the stop names."""
    for level in _levels(account):
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
    asked = f"; the call would hold {format_usd(cost)}" if cost else ""
    return Stop(
        StopReason.BUDGET_EXCEEDED,
        f"{', '.join(parts)} of the {format_usd(level.max_cost)} of {level.name!r}{asked}",
        budget=level.name,
        unit="usd",
        limit=to_usd(level.max_cost),
        used=to_usd(spent),
        held=to_usd(level.held + level.unresolved),
        asked=to_usd(cost),
        momentary=level.held > 0 and level.committed - level.held + (cost or 1) <= level.max_cost,
    )


def _steps_used_up(level: Account, now_ns: int) -> Stop | None:
    if level.steps_taken < level.max_steps:
        return None
    done, under_way = level.steps_done, level.steps_open
    return _count_stop(StopReason.STEP_LIMIT_EXCEEDED, "steps", level, level.max_steps, done, under_way, 1)


def _retries_used_up(level: Account, now_ns: int) -> Stop | None:
    if level.retries < level.max_retries:
        return None
    return _count_stop(StopReason.RETRY_BUDGET_EXCEEDED, "retries", level, level.max_retries, level.retries, 0, 1)


def _time_used_up(level: Account, now_ns: int) -> Stop | None:
    if now_ns < level.deadline_ns:
        return None
    return timeout_stop(level.name, level.limits.time_ns, now_ns - level.opened_ns)


def timeout_stop(name: str, limit_ns: int, elapsed_ns: int) -> Stop:
    """The stop of a deadline: whose it is, how long it was, when it was noticed."""
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
    return replace(stop, momentary=True) if is_momentary else stop


def _api_calls_used_up(level: Account, now_ns: int) -> Stop | None:
    return None if level.api_calls < level.max_api_calls else _api_call_stop(level, 1)


def _api_call_stop(level: Account, asked: int) -> Stop:
    reason = StopReason.API_CALL_LIMIT_EXCEEDED
    return _count_stop(reason, "api calls", level, level.max_api_calls, level.api_calls, 0, asked)


def _does_not_fit(level: Account, cost: int, tokens: int, api_calls: int) -> Stop | None:
    if level.committed + cost > level.max_cost:
        return _cost_stop(level, cost)
    if level.tokens_committed + tokens > level.max_tokens:
        return _token_stop(level, tokens)
    if level.api_calls + api_calls > level.max_api_calls:
        return _api_call_stop(level, api_calls)
    return None


def _count_stop(reason: StopReason, unit: str, level: Account, limit: int, used: int, held: int, asked: int) -> Stop:
    open_part = f" and {held} held" if held else ""
    asking = f"; the call would take {asked}" if asked and used + held < limit else ""
    message = f"{used}{open_part} of the {limit} {unit} of {level.name!r} used{asking}"
    return Stop(reason, message, level.name, unit, float(limit), float(used), float(held), float(asked))


def _advance(held: Taken, to: HoldState) -> bool:
    """Move the hold on by the table; True if it was still held, False if it was unresolved."""
    state = held._state
    if state != "held" and to not in HOLD_TRANSITIONS[state]:  # from held, the table allows every way
        raise LedgerError(f"a hold that is {state} cannot become {to}")
    held._state = to
    return state == "held"


def _give_back(held: Taken, was_held: bool, ran: bool) -> None:
    level: Account | None = held._account
    while level is not None:
        level.committed -= held._held_cost
        level.tokens_committed -= held._held_tokens
        if was_held:
            level.held -= held._held_cost
            level.tokens_held -= held._held_tokens
            level.steps_taken -= 1
            level.steps_given_back += 1
        else:
            level.unresolved -= held._held_cost
            level.tokens_unresolved -= held._held_tokens
        if not ran:
            level.api_calls -= held._held_api_calls
            level.steps_given_back -= 1
        level = level.parent


@dataclass(frozen=True, slots=True)
class Balance:
    """One account at one moment: every figure belongs to the same instant."""

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

    @property
    def spent_usd(self) -> float:
        """What was really spent, in US dollars."""
        return to_usd(self.spent_nanos)

    @property
    def held_usd(self) -> float:
        """What calls under way hold, in US dollars."""
        return to_usd(self.held_nanos)

    @property
    def unresolved_usd(self) -> float:
        """What calls with an unknown bill still hold, in US dollars."""
        return to_usd(self.unresolved_nanos)


class _Unfrozen:
    """A Balance that is being filled in, and then becomes one: to write what is frozen takes four times as long."""

    __slots__ = tuple(one.name for one in fields(Balance))


def balance(account: Account) -> Balance:
    """The account's figures now."""
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
