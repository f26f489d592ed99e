"""A budget that several processes share: a run's account in a ledger store, and what is still to be told there.

The store is the judge over all processes, the run's own ledger the one over this run; a call needs both. What a call
holds at the store is taken before it leaves, and a call that the store cannot record does not leave. How it ended is
told afterwards, and that may fail: the call has happened, so the run goes on, the hold stays taken at the store, which
is the careful side, and what is to be told waits here, in order, for the next act.

Every act has a key, and a store does what a key asks once. So an act whose answer was lost may simply be done again.
Where it is not known whether a hold was recorded, it is withdrawn later, if it is there.

It blocks, as stores do, and knows neither calls nor loops; `holding` brings it to the door.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from penstock.containment.ledger import Amounts, LedgerStore, WouldWait
from penstock.containment.limits import Budget, Limits
from penstock.errors import InvalidValue, KeyTaken, LedgerError, LedgerUnavailable
from penstock.runtime import worker
from penstock.runtime.durable import points
from penstock.runtime.options import must_be_name, must_be_text
from penstock.stops import LIMIT_REASONS, Stop, StopReason

T = TypeVar("T")

Instead = Callable[[Stop], Amounts | None]
"""What to ask for in place of what was refused so; None for nothing."""

UNPRICED = "/unpriced"
"""What the key of a call ends with that leaves without anybody knowing its price."""
MAX_ASKS = 4
"""So often a call may ask, for less each time: a refusal speaks of one account, and there are some above it."""
A_FEW = 8
"""So many acts that wait may be told at once; more would keep an event loop."""


class Act(NamedTuple):
    """Something that the store is still to be told."""

    key: str
    do: Callable[[LedgerStore], object]


class SharedBudget:
    """An account of `store` that a run pays from as well; `prefix` is `run id/claim`, and no two claims share one.

    `ExecutionContext(shared_budget=…)` takes it to the door. The account has to be open. One run uses it at a time.
    `unknown` names another account, which is opened when it is needed: it counts the calls whose cost nobody can tell.
    """

    def __init__(self, store: LedgerStore, account: str, *, prefix: str, unknown: str | None = None) -> None:
        must_be_name("account", account, "the name of an account that is open at the store")
        must_be_text("prefix", prefix)
        if not all(prefix.rpartition("/")):
            raise InvalidValue("prefix", prefix, "the run's id, a slash, and what tells this claim from others")
        self.store = store
        self.blocks = getattr(store, "is_immediate", False) is not True
        """Whether asking may take long enough to be done on a worker: always, unless the store says otherwise."""
        self._at_once: Callable[[Callable[[], Any]], Any] | None = getattr(store, "at_once", None)
        """How the store is asked by who cannot wait, if it can be."""
        self.account = account
        self.unknown_account = unknown
        """Each call whose cost nobody can tell is an api call there, and a token too once somebody can; None for no
        such account."""
        self.prefix = prefix
        self.on_fault: Callable[[str], None] | None = None
        """Told what could not be told to the store: once when that begins, and each time something is given up."""
        self._lock = threading.Lock()
        """For what is in memory; nobody waits under it."""
        self._turn = threading.RLock()
        """Had by whoever tells the store what waits: in order, one at a time."""
        self._waiting: deque[Act] = deque()
        self._open: set[str] = set()
        self._asking: set[str] = set()
        """Keys that the store is being asked for; and those that were taken, until it is known what became of their
        calls: whoever asked may have left, and give back what was taken for it only now."""
        self._is_over = False
        self._refusing: set[str | None] = set()
        self._undrawn = 0
        self._is_behind = False
        self._is_coming = False

    @property
    def waiting(self) -> int:
        """How many acts the store is still to be told of."""
        return len(self._waiting)

    @property
    def asking(self) -> int:
        """How many calls ask the store now, or were let through and have not ended.

        Once a run is over, these are the ones whose callers did not wait for the answer: what the store takes for them
        is given back when it has answered.
        """
        return len(self._asking)

    def key(self, node_id: str, *, unpriced: bool = False) -> str:
        """Under what the call of that id is known at the store.

        Where such calls are counted, that says of one whose price nobody knows that this is so: should its process die,
        nobody else can tell that from a call which costs nothing.
        """
        is_told = unpriced and self.unknown_account is not None
        return f"{self.prefix}/{node_id}{UNPRICED if is_told else ''}"

    def adopt(self) -> tuple[str, ...]:
        """Whatever an earlier claim of this run left held becomes unresolved: nobody knows whether it was billed.

        The keys of it. Of a claim that is still at work this takes nothing away: what it held stays taken, and can
        still be settled. Calls among them whose price nobody knows are counted as of unknown cost.
        """
        run, _, _ = self.prefix.rpartition("/")
        left = tuple(key for key in self.store.held(f"{run}/") if not key.startswith(f"{self.prefix}/"))
        for key in left:
            if key.endswith(UNPRICED):
                self._count_unknown(self.store, key)
            try:
                self.store.leave_unresolved(key)
            except LedgerUnavailable:
                raise
            except LedgerError:  # it has ended since we looked
                continue
        return left

    async def aadopt(self) -> tuple[str, ...]:
        """`adopt`, on a worker."""
        keys: tuple[str, ...] = await worker.LoopJob(self.adopt, ignore).result()
        return keys

    def at_once(self, ask: Callable[[], T]) -> T:
        """What `ask` comes to, if it need not wait for the store; WouldWait if it must."""
        if not self.blocks:
            return ask()
        if self._at_once is None or self.waiting > A_FEW or not self._turn.acquire(blocking=False):
            raise WouldWait
        answers: list[T] = []
        try:
            with suppress(Exception):  # whoever asks again, and can wait, is told what is wrong
                self._at_once(lambda: answers.append(ask()))
        finally:
            self._turn.release()
        if not answers:
            raise WouldWait
        return answers[0]

    # Before a call.

    def take(self, key: str, ask: Amounts, retried: bool, less: Instead | None = None) -> Stop | None:
        """Hold `ask` at the store, or say what refuses; whatever goes wrong, refuses.

        `less` says what is asked for instead of what was refused; None if there is nothing that would do.
        """
        with self._lock:
            if self._is_over:
                return self.unavailable(RuntimeError("its run is over"))
            self._asking.add(key)
        try:
            return self._asked(key, ask, retried, less)
        finally:
            with self._lock:
                if key not in self._open:
                    self._asking.discard(key)

    def _asked(self, key: str, ask: Amounts, retried: bool, less: Instead | None) -> Stop | None:
        self.catch_up()
        if points.hook is not None:
            points.hook("hold.before")
        is_drawn = retried and self._is_drawn()
        try:
            stop = self._held(key, ask, is_drawn, less)
        except WouldWait:  # it is asked again, and is not drawn then either
            if retried and not is_drawn:
                self._was_not_drawn()
            raise
        except BaseException as error:
            if not isinstance(error, KeyTaken):  # only the answer may have been lost; else the key is another call's
                self._later(key, _never_ran(key))
            if not isinstance(error, Exception):
                raise
            return self.unavailable(error)
        if points.hook is not None:
            points.hook("hold.after")
        with self._lock:
            if stop is None:
                self._open.add(key)
        return stop

    def _held(self, key: str, ask: Amounts, is_drawn: bool, less: Instead | None) -> Stop | None:
        stop: Stop | None = None
        for _ in range(MAX_ASKS):
            stop = self.store.hold(key, self.account, ask, retry_drawn=is_drawn)
            if stop is None:
                break
            with self._lock:
                self._refusing.add(stop.budget)
            smaller = None if less is None else less(stop)
            if smaller is None:
                break
            ask = smaller
        return stop

    def close(self) -> None:
        """The run is over: a call whose caller left before a worker came to ask for it does not ask any more."""
        with self._lock:
            self._is_over = True

    def has_refused(self, stop: Stop) -> bool:
        """Whether the stop is of the store's account, or of one above it: then it stops the whole run."""
        return stop.reason in LIMIT_REASONS and stop.budget in self._refusing

    def unavailable(self, error: Exception) -> Stop:
        """The stop of a call that the store cannot record."""
        told = error.args[0] if isinstance(error, KeyError) and error.args else error
        message = f"the shared budget {self.account!r} cannot be held: {told or type(error).__name__}"
        return Stop(StopReason.LEDGER_UNAVAILABLE, message, budget=self.account)

    def _is_drawn(self) -> bool:
        """Whether the retry of this attempt was drawn at the store as well."""
        with self._lock:
            if not self._undrawn:
                return True
            self._undrawn -= 1
            return False

    def _was_not_drawn(self) -> None:
        with self._lock:
            self._undrawn += 1

    # After it; these only write down what is to be told.

    def is_open(self, key: str) -> bool:
        """Whether something was taken under that key whose end is not final."""
        return key in self._open

    def settled(self, key: str, actual: Amounts, succeeded: bool) -> None:
        """The call has used this."""
        self._end(key, lambda store: store.settle(key, actual, succeeded=succeeded))

    def released(self, key: str) -> None:
        """The call failed and cost nothing."""
        self._end(key, lambda store: store.release(key))

    def withdrawn(self, key: str) -> None:
        """The call never ran."""
        self._end(key, _never_ran(key))

    def unresolved(self, key: str) -> None:
        """The call is over and its bill is unknown; it may still be settled."""
        if self.is_open(key):
            self._later(key, lambda store: store.leave_unresolved(key))

    def charged(self, key: str, actual: Amounts) -> None:
        """Something was spent for which nothing was held."""
        self._later(key, lambda store: store.charge(key, self.account, actual))

    def unknown(self, key: str) -> None:
        """Nobody can tell what the call under that key cost."""
        if self.unknown_account is not None:
            self._later(key, lambda store: self._count_unknown(store, key))

    def known(self, key: str) -> None:
        """Somebody can tell after all what that call cost."""
        account = self.unknown_account
        if account is not None:
            self._later(key, lambda store: store.charge(f"{key}/known", account, Amounts(tokens_in=1)))

    def unknown_costs(self) -> int:
        """How many calls the store knows of whose cost nobody can tell, over all claims."""
        try:
            balance = self.store.balance(self.unknown_account or "")
        except KeyError:  # no call came to open it
            return 0
        return balance.api_calls - balance.tokens_in

    def _count_unknown(self, store: LedgerStore, key: str) -> None:
        account = self.unknown_account
        if account is not None:
            store.open_account(account, Limits())
            store.charge(f"{key}/unknown", account, Amounts(api_calls=1))

    def retry_drawn(self, key: str) -> None:
        """The call under that key has failed, and drawn a retry of the run."""

        def draw(store: LedgerStore) -> None:
            if not store.draw_retry(self.account, key):
                self._was_not_drawn()

        self._later(key, draw)

    def _end(self, key: str, do: Callable[[LedgerStore], object]) -> None:
        """Tell it later, as the last of what was taken under that key; not if nothing was, or its end was told."""
        with self._lock:
            if key in self._open:
                self._open.discard(key)
                self._waiting.append(Act(key, do))
                self._asking.discard(key)

    def _later(self, key: str, do: Callable[[LedgerStore], object]) -> None:
        with self._lock:
            self._waiting.append(Act(key, do))
            self._asking.discard(key)

    # Telling.

    def catch_up(self) -> int:
        """Tell the store what waits, as far as it can be told; how many acts still wait."""
        with self._turn:
            while self._waiting and self._tell(self._waiting[0]):
                pass
        return self.waiting

    async def acatch_up(self) -> int:
        """`catch_up`, on a worker."""
        with suppress(WouldWait):
            return self.at_once(self.catch_up)
        left: int = await worker.LoopJob(self.catch_up, ignore).result()
        return left

    def catch_up_soon(self) -> None:
        """Let a worker tell the store what waits; nobody waits for that."""
        if not self.blocks:
            self.catch_up()
            return
        with self._lock:
            if self._is_coming or not self._waiting:
                return
            self._is_coming = True
        try:
            worker.start(worker.Job(self._come, ignore))
        except RuntimeError:  # no thread is to be had: the next act tells it
            self._is_coming = False

    def _come(self) -> None:
        self._is_coming = False
        self.catch_up()

    def _tell(self, act: Act) -> bool:
        """Do the act that waits longest; False if the store cannot record it now."""
        if points.hook is not None:
            points.hook("settle.before")
        try:
            act.do(self.store)
        except LedgerUnavailable as error:
            return self._stays(act, error)
        except (LedgerError, KeyError) as error:
            # Somebody has ended the hold in another way: theirs stands.
            self._is_done(act)
            self._complain(f"{act.key!r} could not be ended at the shared budget {self.account!r}: {error}")
            return True
        except Exception as error:
            return self._stays(act, error)
        if points.hook is not None:
            points.hook("settle.after")
        self._is_done(act)
        self._is_behind = False
        return True

    def _is_done(self, act: Act) -> None:
        with self._lock:
            self._waiting.remove(act)

    def _stays(self, act: Act, error: Exception) -> bool:
        """Let the others have a try before this one has another, but never one of the same key before it."""
        with self._lock:
            of_it = [one for one in self._waiting if one.key == act.key]
            self._waiting = deque([*(one for one in self._waiting if one.key != act.key), *of_it])
        if not self._is_behind:
            self._is_behind = True
            self._complain(
                f"the shared budget {self.account!r} could not be told how {act.key!r} ended, which stays held there "
                f"until it can: {error}"
            )
        return False

    def _complain(self, message: str) -> None:
        if self.on_fault is not None:
            self.on_fault(message)

    def __repr__(self) -> str:
        return f"<SharedBudget {self.account!r} as {self.prefix!r}>"


def _never_ran(key: str) -> Callable[[LedgerStore], object]:
    """Give back what the key holds, if it holds something."""

    def give_back(store: LedgerStore) -> None:
        for end in (store.withdraw, store.release):
            try:
                return end(key)
            except LedgerUnavailable:
                raise
            except LedgerError:  # adopted meanwhile, and then it can be released; or never recorded
                continue
        return None

    return give_back


def budget_behind(stop: Stop) -> Budget:
    """The one ceiling that a stop of the store names, as a Budget; one on retries has no place there."""
    limit = stop.limit
    if limit is None:
        return Budget()
    if stop.unit == "usd":
        return Budget(max_cost_dollars=limit)
    if stop.unit == "seconds":
        return Budget(max_time_seconds=limit)
    counted = {"steps": "max_steps", "tokens": "max_tokens", "api calls": "max_api_calls"}.get(stop.unit or "")
    return Budget() if counted is None else Budget(**{counted: int(limit)})


def ignore(value: object, error: BaseException | None) -> None:
    """Whoever wanted to know has gone."""
