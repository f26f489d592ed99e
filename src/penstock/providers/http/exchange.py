"""One contained model call over HTTP, from its admission to its settlement.

The call is admitted before anything is sent, and stays open until the response is read to its end or closed.
`refused_by`, `failed`, `ended` and `closed` may be called from any thread and any number of times; the first call
settles. The cost is known if the response reported its usage at its end, or if the failure is known to be free;
otherwise the hold stays unresolved, since a provider charges for generated output, whether or not it arrived. A
complete response without usage costs its whole hold. A response longer than was paid for is cut off, and at least the
received part is charged.

Knows admission and settlement and the two sides of an exchange, and nothing of HTTP libraries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from penstock.containment import accounts
from penstock.containment.limits import UNLIMITED
from penstock.errors import CancelledError, Halted, PenstockError, RunEnded
from penstock.providers.http.forms import note_redirect
from penstock.providers.http.refusals import BrokenAnswer, ProviderStatus, refusal_of
from penstock.providers.http.request import ModelRequest
from penstock.providers.http.response import NO_HEADERS, Answer, Events, answer_of
from penstock.providers.reading.bodies import Sink, decoded
from penstock.providers.reading.families import in_the_families
from penstock.providers.reading.meter import Allowance, Meter
from penstock.runtime.admission import admit as admit_call
from penstock.runtime.admission import after_end, await_room, refuse, wait_for_room
from penstock.runtime.billing.error_bill import ErrorBill, is_free_status
from penstock.runtime.billing.usage import Usage
from penstock.runtime.call import Call, CallSpec, blank, running_call, stop_of, stopped
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.clamping import clamp
from penstock.runtime.context import innermost
from penstock.runtime.execution import ahold_remote, finish, finish_failed, hold_remote
from penstock.runtime.handle import Handle
from penstock.runtime.settlement import end_interrupted
from penstock.runtime.streams import PieceBuffer
from penstock.runtime.waiting import Waits
from penstock.stops import Stop, StopReason
from penstock.tracing.record import OPEN

MAX_MODEL_OUTPUT = 1_000_000
"""Maximum output read of an answer without any other limit; more than any model generates in one answer."""
NEEDS_MAXIMUM = "is signed, so that no maximum can be added to it: set inferenceConfig.maxTokens (or max_tokens)"
CANNOT_SHRINK = "is signed and cannot be clamped: set a smaller inferenceConfig.maxTokens (or max_tokens)"


@dataclass(frozen=True, slots=True)
class Terms:
    """The run and the output limits that apply to a model call."""

    context: Handle
    max_output_tokens: int
    """Output limit of a request that sets none."""
    floor: int
    """Smallest output limit a request is clamped to."""
    error_bill: ErrorBill | None = None
    """Cost of error answers; None decides by the status."""


class Exchange:
    """An admitted model call."""

    def __init__(self, call: Call, request: ModelRequest, error_bill: ErrorBill | None = None) -> None:
        self.call = call
        self.request = request
        self.output_tokens = 0
        """Maximum output of each answer."""
        self.answer = self._new_answer()
        self._error_bill = error_bill
        self._is_over = False
        self._lock = threading.Lock()
        self._let_go: Callable[[], None] | None = None

    @property
    def token(self) -> CancellationToken:
        """The cancellation token of the call."""
        return self.call.token

    @property
    def blocks_inline(self) -> bool:
        """Whether sync calls run in the calling thread, where a stop cannot interrupt them."""
        return self.call.context._run.settings.sync_calls == "inline"

    def hold(self) -> None:
        """Wait for room, and hold at the shared budget, if there is one; raise if the call is refused."""
        call = self.call
        with self._interruptible():
            wait_for_room(call)
            self._check_degraded()
            if call.stop is not None or not hold_remote(call):
                raise self.refusal()
            self.answer = self._new_answer()

    async def ahold(self) -> None:
        """Wait for room, and hold at the shared budget, if there is one; raise if the call is refused."""
        call = self.call
        with self._interruptible():
            await await_room(call)
            self._check_degraded()
            if call.stop is not None or not await ahold_remote(call):
                raise self.refusal()
            self.answer = self._new_answer()

    def _check_degraded(self) -> None:
        """Refuse the call if a hook wants another model, and the request cannot be made with it."""
        model = self.call.degraded_model
        if self.call.stop is None and model is not None and self.request.is_model_fixed:
            fixed = "its path names the model, or it is signed"
            why = f"a hook wants model {model!r}, and this request cannot be changed: {fixed}"
            refuse(self.call, Stop(StopReason.HOOK_DENIED, why, self.call.context.name))

    def refusal(self) -> Halted | CancelledError:
        """Return the error for a call that is not sent, with advice if its body could not be made smaller."""
        stop = self.call.stop
        assert stop is not None
        if self.request.is_fixed and self.request.form.output == "text" and stop.unit in ("usd", "tokens"):
            self.call.stop = replace(stop, message=f"{stop.message}; the request {CANNOT_SHRINK}")
        return refusal_of(self.call)

    def _new_answer(self) -> Answer:
        return Answer(Meter(allowance_of(self.request, self.output_tokens)))

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """End the call if an exception, such as one from a signal handler, interrupts the block."""
        try:
            yield
        except BaseException as error:
            end_interrupted(self.call, error)
            raise

    def body(self, host: str) -> bytes:
        """Return the client's body, with no more output than was held for."""
        return self.request.written(self.output_tokens, host, self.call.degraded_model)

    def opened(
        self, content_type: str, coding: str, cut: Callable[[], None], headers: Mapping[str, str] = NO_HEADERS
    ) -> Sink:
        """Return the reader of the response; `cut` breaks its connection, from any thread.

        `headers` are those of the response: Bedrock reports its usage there.
        """
        request, text = self.request, PieceBuffer(self.call.context._run.settings.max_kept_pieces)
        self.answer = answer_of(
            self.answer.meter,
            request.form.api,
            content_type,
            headers,
            streams=request.streams,
            answers=request.shown_answers,
            withholds_usage=request.adds_usage,
            on_text=text.append,
        )
        if isinstance(self.answer, Events):
            self.call.stream = text.output
        self._let_go = self.token.add_callback(cut)
        return decoded(self.answer, coding)

    def refused_by(self, status: int, host: str = "", path: str = "", location: str | None = None) -> None:
        """Settle a response with a non-success status; raise if the client must not retry.

        `location` is the target of a redirect from that host and path; a request to it is a call of its own.
        """
        if location is not None:
            note_redirect(self.request.form, host, path, location)
        if self._first():
            finish_failed(self.call, ProviderStatus(status, is_free_status(self._error_bill, status)))
            if self.call.stop is not None:
                raise refusal_of(self.call) from self.call.error

    def failed(self, error: BaseException) -> BaseException:
        """Settle a failed exchange; return the error to raise to the caller."""
        if self._first():
            self.call.usage = self.answer.usage
            finish_failed(self.call, error)
        if self.call.stop is not None:
            return refusal_of(self.call)
        return in_the_families(error) if isinstance(error, PenstockError) else error

    def ended(self) -> None:
        """Settle a response that was read to its end; raise if the call was stopped meanwhile."""
        if not self._first():
            return
        if self.answer.is_complete and self.answer.fault is None:
            self._succeed()
            if self.call.stop is not None:
                raise refusal_of(self.call)
        else:
            self._break(BrokenAnswer(self.answer.fault or "the answer ended before it was complete"))

    def closed(self) -> None:
        """Settle a response that the client closes, at its end or before."""
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
        # The cost of a call whose worst case is unknown stays unknown, unless its answer reports it.
        is_estimated = self.call.hinted or self.request.form.output != "unknown"
        self.call.usage = self.answer.usage or (self._worst_case() if is_estimated else None)
        finish(self.call)

    def _worst_case(self) -> Usage:
        """Return the usage charged for a response that reports none: the hold, or the received output if larger."""
        meter = self.answer.meter
        is_held = self.call.hinted and not meter.is_over
        return replace(meter.worst_case(), cost_nanos=self.call._held_cost if is_held else None)

    def _break(self, error: BrokenAnswer | CancelledError) -> None:
        self.call.usage = self.answer.usage
        finish_failed(self.call, error)

    def _first(self) -> bool:
        with self._lock:
            first, self._is_over = not self._is_over, True
        if first:
            if self._let_go is not None:
                self._let_go()
            _zero_enclosing_calls(self.call)
        return first


def admit(terms: Terms, request: ModelRequest, waits: Waits) -> Exchange:
    """Admit the model call, or let it wait for `hold` or `ahold`; raise if it is refused."""
    context = innermost(terms.context)
    _must_be_open(context, f"llm call {request.model!r}")
    parent, token = running_call.get(), context._token
    if parent is not None and parent.context._token is token and parent.record.end_seq == OPEN:
        token = parent.token  # it has the deadline of the enclosing call
    exchange = Exchange(blank(Call), request, terms.error_bill)
    worst_case, is_unbounded = _worst_case(terms, context, exchange), _is_unbounded(context, request)
    if is_unbounded:  # it is recorded, and refused whatever is left
        worst_case, waits = lambda: (0, 0), "no"
    cost, tokens = (None, None) if worst_case is None else worst_case()
    spec = CallSpec("llm", request.model or request.form.api, cost, request.model or None, tokens)
    with exchange._interruptible():
        may_run = admit_call(exchange.call, context, spec, token, (), request.attempt, waits, worst_case)
        if may_run and is_unbounded:
            refuse(exchange.call, Stop(StopReason.PRICE_UNKNOWN, f"the request {NEEDS_MAXIMUM}", context.name))
            may_run = False
        if not may_run and exchange.call.waiter is None:
            raise exchange.refusal()
    return exchange


def refuse_after_stop(terms: Terms, what: str) -> None:
    """Raise the error of a model call of these terms if its run has ended or was stopped."""
    context = innermost(terms.context)
    _must_be_open(context, what)
    token = context._token
    if token.is_cancelled:
        error = stopped(context, stop_of(token))
        raise error if isinstance(error, CancelledError) else in_the_families(error)


def allowance_of(request: ModelRequest, output_tokens: int) -> Allowance:
    """Return how much of the answer is read, with this output for each answer."""
    form = request.form
    if form.output == "text":
        return Allowance.of(
            request.body,
            request.input_tokens,
            output_tokens * request.answers,
            streams=request.streams,
            repeats=request.shown_answers if request.body.get("echo") else 0,
            is_wide=request.is_wide,
        )
    if form.api == "unknown":
        return Allowance.of_data(0, UNLIMITED)
    return Allowance.of_data(request.input_tokens, request.max_data_bytes)


def _worst_case(terms: Terms, context: Handle, exchange: Exchange) -> Callable[[], tuple[int | None, int]] | None:
    """Return a function that estimates the worst case of the call and clamps its output to it; None if it has no
    estimate.
    """
    request, answers, prices = exchange.request, exchange.request.answers, context._run.prices
    wanted = _wanted_output(terms, request)
    floor = wanted if request.is_fixed else min(wanted, max(terms.floor, request.least_output_tokens))
    if request.form.output == "unknown":
        price = prices.price_of(request.model)
        # Speech is billed by its characters, unless its audio output has a price too.
        if request.form.api != "speech" or price is None or price.output_usd_per_mtok:
            return None

    def clamped() -> tuple[int | None, int]:
        worst = clamp(context, request.model, request.input_tokens, wanted * answers, floor * answers)
        exchange.output_tokens = worst.output_tokens // answers
        return worst.cost_nanos, worst.tokens

    return clamped


def _wanted_output(terms: Terms, request: ModelRequest) -> int:
    """Return the output that the call would have without any limit, for each answer."""
    if request.form.output != "text":
        return 0
    if request.output_tokens is not None:
        return request.output_tokens
    return MAX_MODEL_OUTPUT if request.is_fixed else terms.max_output_tokens


def _is_unbounded(context: Handle, request: ModelRequest) -> bool:
    """Whether a limit applies to the call but its output is unbounded: no maximum can be written into its body."""
    if not request.is_fixed or request.form.output != "text" or request.output_tokens is not None:
        return False
    account = context._account
    is_limited = accounts.has_cost_limit(account) or accounts.tokens_left(account) < UNLIMITED // 2
    return is_limited or context._run.shared is not None


def _must_be_open(context: Handle, what: str) -> None:
    if context._base.end_seq != OPEN:
        try:
            refused = after_end(context, what)
        except RunEnded as error:
            raise in_the_families(error) from None
        raise refusal_of(refused)


def _zero_enclosing_calls(call: Call) -> None:
    """Set the cost of enclosing model calls to zero: they are billed by this call, and not a second time."""
    parent = call.parent_call
    while parent is not None:
        if parent.record.kind == "llm" and parent.usage is None:
            parent.usage = Usage(cost_nanos=0)
        parent = parent.parent_call
