"""Blocks of a shared budget: a part of a daily budget, set aside for the runs of one worker.

The account of a day is above every run of that day, so every call locks its row. One row takes about a thousand updates
a second, however many workers there are. A block is an account above the runs of one worker, without a parent of its
own: its budget is held at the accounts of the day, once for many calls, which then lock only their own run and block.

No call is decided differently because of that. A block that cannot pay for a call gets more. If little is left of the
day, or anything waits for it, blocks end: they are put under the accounts of the day, with everything taken from them,
and the amount held for them is given back. From then on, their calls are admitted, wait and are refused at the day's
accounts, as without blocks. Any process may end a block: another process whose call finds too little left, the worker
itself, or the worker that takes over a run of a dead one. Running calls keep their own holds all along, so that those
of a dead worker become unresolved one by one.

The invariant: while a block is under no account, its ceiling is at most the amount held for it. So its ceiling is
raised after more was held, and no hold is given back before the block is under the accounts of the day. In between its
spending counts twice there, which errs on the safe side.

Every step is one operation of the store, may be repeated, and may be the last one of a process that dies.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence
from urllib.parse import quote, unquote

from penstock.clock import Clock
from penstock.containment.ledger import Amounts
from penstock.containment.limits import NO_LIMITS, UNLIMITED, Limits
from penstock.errors import LedgerError, LedgerUnavailable
from penstock.runtime.durable.async_ledger import AsyncLedger

BLOCKS = "block:"
"""Prefix of their names as accounts."""
HELD = "//"
"""Prefix of the keys of the holds for blocks, followed by the block's name; no run id begins like that."""
SHARE = 64
"""Divisor of the rest of the day's budget for the largest block, so that blocks get smaller as the budget is used."""
MIN_CALLS = 4
"""Minimum number of calls that a block pays for: a smaller one is not worth its two updates of the day's accounts."""
MIN_NANOS = 1_000_000
"""Size of the smallest block before the cost of a call is known: a tenth of a cent."""
LASTS_S = 60.0
"""Age at which a worker replaces a block; the unspent amount is given back then."""
ABANDONED_S = 600.0
"""Age at which a block belongs to a dead worker; measured by wall clocks, since any worker ends it."""
NANOS_PER_S = 1_000_000_000
NO_MONEY = Limits(cost_nanos=0)


def is_block(account: str | None) -> bool:
    """Whether this is the name of a block."""
    return account is not None and account.startswith(BLOCKS)


def _name(mark: str, levels: Sequence[str]) -> str:
    return f"{BLOCKS}{mark}/{'/'.join(quote(level, safe=':', errors='surrogatepass') for level in levels)}"


def _levels(block: str) -> list[str]:
    """Return the accounts that a block is a part of, the widest first."""
    return [unquote(level, errors="surrogatepass") for level in block.split("/")[1:]]


def _block_of(key: str) -> str:
    return key.removeprefix(HELD).rpartition("/#")[0]


async def make_room(ledger: AsyncLedger, account: str, cost_nanos: int) -> bool:
    """Make room at an account that has refused a call of this cost; return whether anything has changed there."""
    if not is_block(account):
        return await recall(ledger, account)
    # An ended block may refuse too, while a worker that does not know of its end raises its ceiling.
    if await _has_ended(ledger, account) or not await _enlarge(ledger, account, cost_nanos):
        await end_block(ledger, account)
    return True


async def _has_ended(ledger: AsyncLedger, block: str) -> bool:
    """Whether the block is under the day's accounts: more is taken from it than is held for it, or nothing is held."""
    held = sum(amounts.cost_nanos for amounts in (await ledger.held(f"{HELD}{block}/#")).values())
    balance = await ledger.balance(block)
    return not held or balance.spent_nanos + balance.held_nanos + balance.unresolved_nanos > held


async def recall(ledger: AsyncLedger, account: str) -> bool:
    """End all blocks that are a part of this account; return whether there were any."""
    blocks = {_block_of(key) for key in await ledger.held(f"{HELD}{BLOCKS}")}
    found = sorted(block for block in blocks if account in _levels(block))
    for block in found:
        await end_block(ledger, block)
    return bool(found)


async def end_block(ledger: AsyncLedger, block: str) -> None:
    """Put a block under the accounts that it is a part of, and give back the amount held for it."""
    try:
        await ledger.put_under(block, _levels(block)[-1])
        await ledger.grant(block, NO_LIMITS)
    except KeyError:  # it was removed; accounts for which anything is held are not
        return
    for key in await ledger.held(f"{HELD}{block}/#"):
        try:
            await ledger.withdraw(key)
        except LedgerUnavailable:
            raise
        except LedgerError:  # another process ends it too
            continue


async def _enlarge(ledger: AsyncLedger, block: str, cost_nanos: int) -> bool:
    """Hold more for a block and raise its ceiling by it; return whether that was possible."""
    nanos = await _share(ledger, _levels(block))
    if nanos < max(MIN_CALLS * cost_nanos, MIN_NANOS):
        return False
    before = await ledger.held(f"{HELD}{block}/#")
    key = f"{HELD}{block}/#{secrets.token_hex(8)}"
    if await ledger.hold(key, _levels(block)[-1], Amounts(cost_nanos=nanos)) is not None:
        return False
    held = await ledger.held(f"{HELD}{block}/#")
    await ledger.grant(block, Limits(cost_nanos=sum(amounts.cost_nanos for amounts in held.values())))
    # If another process ended the block meanwhile, its ceiling has to be lowered again, and the new hold released.
    return before.keys() | {key} <= (await ledger.held(f"{HELD}{block}/#")).keys()


async def _share(ledger: AsyncLedger, levels: Collection[str]) -> int:
    """Return the possible size of a block now; 0 if none of these accounts has a limit."""
    left = []
    for level in levels:
        balance = await ledger.balance(level)
        if balance.limits.cost_nanos < UNLIMITED:
            taken = balance.spent_nanos + balance.held_nanos + balance.unresolved_nanos
            left.append(max(0, balance.limits.cost_nanos - taken))
    return min(left, default=0) // SHARE


class Blocks:
    """The blocks of one worker."""

    def __init__(self, ledger: AsyncLedger, mark: str, clock: Clock) -> None:
        """`mark` is unique to the worker."""
        self._ledger = ledger
        self._mark = mark
        self._clock = clock
        self._current: dict[tuple[str, ...], tuple[str, int]] = {}
        """The block of each chain of accounts, and the time at which it is replaced."""
        self._making = asyncio.Lock()
        self._number = 0

    async def account_for(self, levels: Sequence[str]) -> str:
        """Return the account to open a run under: a block of these accounts, widest first, or the lowest of them."""
        key = tuple(levels)
        known = self._current.get(key)
        if known is not None and self._clock.monotonic_ns() < known[1]:
            return known[0]
        async with self._making:  # runs that begin at the same time share a block
            return await self._replaced(key)

    async def _replaced(self, levels: tuple[str, ...]) -> str:
        now_ns, known = self._clock.monotonic_ns(), self._current.get(levels)
        if known is not None and now_ns < known[1]:
            return known[0]
        if known is not None and is_block(known[0]):  # its unspent amount can be in the next one
            await end_block(self._ledger, known[0])
        self._number += 1
        made_s = self._clock.time_ns() // NANOS_PER_S
        block = _name(f"{self._mark}.{self._number}.{made_s}", levels)
        await self._ledger.open_account(block, NO_MONEY)
        is_made = await _enlarge(self._ledger, block, 0)
        # Also when there is no room for a block: it is not tried again for every run.
        self._current[levels] = block if is_made else levels[-1], now_ns + round(LASTS_S * NANOS_PER_S)
        if not is_made:
            await end_block(self._ledger, block)
            await self._ledger.forget([block])
        return self._current[levels][0]

    async def tidy(self) -> None:
        """End the blocks of this worker that are due, and those left by dead workers."""
        now_ns, now_s = self._clock.monotonic_ns(), self._clock.time_ns() // NANOS_PER_S
        for levels, (block, until_ns) in [*self._current.items()]:
            if now_ns >= until_ns:
                self._current.pop(levels, None)
                if is_block(block):
                    await end_block(self._ledger, block)
        for block in {_block_of(key) for key in await self._ledger.held(f"{HELD}{BLOCKS}")}:
            made_s = int(block.partition("/")[0].rpartition(".")[2])
            if abs(now_s - made_s) > ABANDONED_S:
                await end_block(self._ledger, block)

    async def close(self) -> None:
        """End all blocks of this worker."""
        current, self._current = self._current, {}
        for block, _ in current.values():
            if is_block(block):
                await end_block(self._ledger, block)
