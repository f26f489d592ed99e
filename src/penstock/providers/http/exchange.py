"""One model call over HTTP on its way through the door, from its admission to its one end.

The call is admitted before anything is sent, and stays open until the answer was read to its end or let go. Whatever
happens in between comes here: `refused_by`, `failed`, `ended` and `closed` may be called by whoever notices, from any
thread and any number of times; the first one settles. A bill is known if the answer told its usage at its end, or if
the failure is known to be free; otherwise what was held stays held as unresolved, since a provider charges for what it
generated, arrived or not. An answer that is complete and says nothing of its usage costs what was held for it.

Knows the door and the two sides of an exchange, and nothing of HTTP libraries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import CancelledError
from penstock.providers.http.answered import Answer, Events, Plain, Unreadable
from penstock.providers.http.asked import Asked
from penstock.providers.http.refusals import BrokenAnswer, ProviderStatus, in_the_families, refusal_of
from penstock.runtime.admission import enter
from penstock.runtime.billing.usage import Usage
from penstock.runtime.call import Call, running_call
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.clamping import clamp
from penstock.runtime.context import current_context
from penstock.runtime.durable import holding
from penstock.runtime.handle import Handle
from penstock.runtime.settlement import fail, succeed
from penstock.stops import Stop, StopReason
from penstock.tracing.record import OPEN


@dataclass(frozen=True, slots=True)
class Terms:
    """Under what a model call is made."""

    context: Handle
    max_output_tokens: int
    """What a request gets that does not say how much output it wants."""
    floor: int
    """The least output that is worth asking for."""


class Exchange:
    """A model call that was let through."""

    def __init__(self, call: Call, asked: Asked, output_tokens: int) -> None:
        self.call = call
        self.asked = asked
        self.output_tokens = output_tokens
        """What each answer may have."""
        self.answer: Answer = Unreadable()
        self._is_over = False
        self._lock = threading.Lock()
        self._let_go: Callable[[], None] | None = None

    @property
    def token(self) -> CancellationToken:
        """What stops the call."""
        return self.call.token

    @property
    def blocks_inline(self) -> bool:
        """Whether the run wants its sync calls in the thread that makes them, even if they cannot be left then."""
        return self.call.context._run.settings.sync_calls == "inline"

    def hold(self) -> None:
        """Hold at the budget that other processes share, if there is one; raise what refuses."""
        shared = self.call.context._run.shared
        if shared is not None and not holding.hold(shared, self.call):
            raise refusal_of(self.call)

    async def ahold(self) -> None:
        """Hold at the budget that other processes share, if there is one; raise what refuses."""
        shared = self.call.context._run.shared
        if shared is not None and not await holding.ahold(shared, self.call):
            raise refusal_of(self.call)

    def body(self, host: str) -> bytes:
        """What is sent: the client's body, with no more output than was held for."""
        return self.asked.written(self.output_tokens, host, self.call.degraded_model)

    def opened(self, content_type: str, coding: str, cut: Callable[[], None]) -> None:
        """The answer begins to come; `cut` breaks its connection, from any thread."""
        asked = self.asked
        if coding not in ("", "identity"):
            self.answer = Unreadable()
        elif content_type.startswith("text/event-stream"):
            self.answer = Events(asked.form.api, asked.answers, asked.adds_usage)
        else:
            self.answer = Plain()
        self._let_go = self.token.add_callback(cut)

    def refused_by(self, status: int) -> None:
        """The provider answered with a status that is no answer; raises if the client is not to try again."""
        if self._first():
            self._fail(ProviderStatus(status))
            if self.call.stop is not None:
                raise refusal_of(self.call) from self.call.error

    def failed(self, error: BaseException) -> BaseException:
        """The exchange broke off; what the caller is to be told."""
        if self._first():
            self.call.usage = self.answer.usage
            self._fail(error)
        if self.call.stop is None:
            return error
        return refusal_of(self.call)

    def ended(self) -> None:
        """The answer was read to its end; raises if the call was stopped meanwhile."""
        if not self._first():
            return
        if self.answer.is_complete and self.answer.fault is None:
            self._succeed()
            if self.call.stop is not None:
                raise refusal_of(self.call)
        else:
            self._break(BrokenAnswer(self.answer.fault or "the answer ended before it was complete"))

    def closed(self) -> None:
        """The client lets go of the answer, at its end or before."""
        if not self._first():
            return
        if self.answer.fault is not None:
            self._break(BrokenAnswer(self.answer.fault))
        elif self.answer.is_complete:
            self._succeed()
        else:
            why = Stop(StopReason.ABORTED, "the client closed the answer before its end", self.call.context.name)
            self._break(CancelledError(stop=why))

    def _succeed(self) -> None:
        self.call.usage = self.answer.usage or self._worst_case()
        succeed(self.call, None)
        self._tell_shared()

    def _worst_case(self) -> Usage:
        """All that was held for: what an answer is taken to have used that does not say so."""
        output_tokens = self.output_tokens * self.asked.answers
        cost_nanos = self.call._held_cost if self.call.hinted else None
        return Usage(self.asked.input_tokens, output_tokens, cost_nanos=cost_nanos)

    def _break(self, error: BrokenAnswer | CancelledError) -> None:
        self.call.usage = self.answer.usage
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        try:
            fail(self.call, error)
        finally:
            self._tell_shared()

    def _tell_shared(self) -> None:
        shared = self.call.context._run.shared
        if shared is not None:
            holding.leave(shared, self.call)

    def _first(self) -> bool:
        with self._lock:
            first, self._is_over = not self._is_over, True
        if first:
            if self._let_go is not None:
                self._let_go()
            _pay_for_those_above(self.call)
        return first


def admit(terms: Terms, asked: Asked) -> Exchange:
    """Take the model call through the first half of the door; raise what refuses it."""
    context = _innermost(terms.context)
    _must_be_open(context, f"llm call {asked.model!r}")
    above, token = running_call.get(), context._token
    if above is not None and above.context._token is token and above.record.end_seq == OPEN:
        token = above.token  # which has the deadline of the call around this one
    wanted = terms.max_output_tokens if asked.output_tokens is None else asked.output_tokens
    floor = min(wanted, max(terms.floor, asked.least_output_tokens))
    answers, name = asked.answers, asked.model or asked.form.api
    worst = clamp(context, asked.model, asked.input_tokens, wanted * answers, floor * answers)
    model, held = asked.model or None, worst.cost_nanos
    call = enter(context, "llm", name, held, model, token, (), asked.attempt, tokens=worst.tokens)
    if call.stop is not None:
        raise refusal_of(call)
    return Exchange(call, asked, worst.output_tokens // answers)


def refuse_unpriced(terms: Terms, path: str) -> None:
    """Raise if the run is strict: what this costs is not known before, and would not be known after."""
    context = _innermost(terms.context)
    if not context._run.settings.strict:
        return
    _must_be_open(context, f"llm call {path!r}")
    call = enter(context, "llm", path, None, None, context._token)
    if call.stop is not None:
        raise refusal_of(call)
    succeed(call, None)


def _innermost(context: Handle) -> Handle:
    """The deepest place of the same run that this thread or task is in: the call is made from there, and paid there."""
    places: list[Handle] = [context]
    entered, above = current_context(), running_call.get()
    if entered is not None:
        places.append(entered)
    if above is not None and above.record.end_seq == OPEN:
        places.append(above.context)
    same = [place for place in places if place._run is context._run and place._base.end_seq == OPEN]
    # Of two at the same depth the later one: it may be the same place under a budget of its own.
    return max(reversed(same), key=lambda place: place._base.depth, default=context)


def _must_be_open(context: Handle, what: str) -> None:
    if context._base.end_seq != OPEN:
        raise in_the_families(context._after_the_end(what))


def _pay_for_those_above(call: Call) -> None:
    """A model call of the same run that made this one has its bill here: what it returns is not billed again."""
    above = call.above
    while above is not None:
        if above.record.kind == "llm" and above.usage is None:
            above.usage = Usage(cost_nanos=0)
        above = above.above
