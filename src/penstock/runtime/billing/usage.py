"""Read the usage of a call from the value that its function returned, or from its error.

A usage is tokens, a model and a cost. The shapes of common clients are recognised by their field names, without
importing the clients. Reads no clock and no price, and never raises into a call.

Which figures are trusted. A count is a real int from 0 to `MAX_TOKENS`; one that is absent or None is 0.
- Any other count (negative, bool, float, NaN, text, a mock) makes the whole usage invalid: the result is None, which
  the ledger treats as "unknown" and not as "nothing".
- Input and output both absent: no usage. A free response has to report zero.
- Cached and written tokens that are a part of the input cannot exceed it; an implausible part is input at full price.
- A total above the sum of input and output counts: the rest is output. Some servers leave reasoning tokens out of the
  output, and bill them as output.

Of the causes of an error only the explicit ones (`raise … from …`) are read. The implicit `__context__` may be an
unrelated error that was being handled when this call began.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import islice
from types import MethodType
from typing import Generic, TypeGuard, TypeVar, final

from penstock.errors import InvalidValue
from penstock.money import MAX_NANOS, Usd, to_nanos

T = TypeVar("T")

MAX_TOKENS = 10**12
"""Larger counts are a mistake, not a usage."""
MAX_NAME = 256
MAX_CHAIN = 8
MAX_HEADERS = 500
MAX_RETRY_AFTER_S = 3600.0


@final
@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of one call. `input_tokens` is all input; cached and written tokens are parts of it."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_input_tokens: int = 0
    """The part of the input that was read from the provider's cache."""
    cache_write_tokens: int = 0
    """The part of the input that was written to the provider's cache."""
    model: str | None = None
    cost_nanos: int | None = None
    """Cost reported by the caller; None to use the price table."""

    @classmethod
    def of(
        cls,
        *,
        cost_usd: Usd | None = None,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cached_input_tokens: int = 0,
        cache_write_tokens: int = 0,
        model: str | None = None,
    ) -> Usage:
        """Return a usage with checked figures; raise InvalidValue for a wrong one."""
        if not _are_counts(input_tokens, output_tokens, cached_input_tokens, cache_write_tokens):
            counts = {
                "input_tokens": input_tokens,
                "output_tokens": output_tokens,
                "cached_input_tokens": cached_input_tokens,
                "cache_write_tokens": cache_write_tokens,
            }
            field, count = next((field, count) for field, count in counts.items() if not _is_count(count))
            raise InvalidValue(field, count, "a whole number of tokens from 0 to 10**12")
        if cached_input_tokens + cache_write_tokens > input_tokens:
            is_cached = cached_input_tokens > input_tokens
            field = "cached_input_tokens" if is_cached else "cache_write_tokens"
            part = cached_input_tokens if is_cached else cache_write_tokens
            raise InvalidValue(field, part, f"a part of input_tokens, of which there are {input_tokens}")
        if model is not None and _name(model) is None:
            raise InvalidValue("model", model, f"a model name of 1 to {MAX_NAME} characters, or None")
        cost_nanos = None if cost_usd is None else to_nanos(cost_usd, "cost_usd")
        return cls(input_tokens, output_tokens, cached_input_tokens, cache_write_tokens, model, cost_nanos)

    @property
    def total_tokens(self) -> int:
        """Input and output together."""
        return self.input_tokens + self.output_tokens

    def plus(self, more: Usage) -> Usage:
        """Return the sum; if only one of them has a cost, that is the cost of both."""
        costs = [cost for cost in (self.cost_nanos, more.cost_nanos) if cost is not None]
        return Usage(
            input_tokens=self.input_tokens + more.input_tokens,
            output_tokens=self.output_tokens + more.output_tokens,
            cached_input_tokens=self.cached_input_tokens + more.cached_input_tokens,
            cache_write_tokens=self.cache_write_tokens + more.cache_write_tokens,
            model=more.model or self.model,
            cost_nanos=sum(costs) if costs else None,
        )


@final
@dataclass(frozen=True, slots=True)
class Reported(Generic[T]):
    """A function's result with its usage; the caller of the function gets `value` alone."""

    value: T
    usage: Usage

    @classmethod
    def of(
        cls,
        value: T,
        *,
        cost_usd: Usd | None = None,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cached_input_tokens: int = 0,
        cache_write_tokens: int = 0,
        model: str | None = None,
    ) -> Reported[T]:
        """Return `value` with checked usage figures; raise InvalidValue for a wrong one."""
        usage = Usage.of(
            cost_usd=cost_usd,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cached_input_tokens=cached_input_tokens,
            cache_write_tokens=cache_write_tokens,
            model=model,
        )
        return cls(value, usage)


Get = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """One format of token counts. Counts that a shape lists together are added up."""

    marks: tuple[str, ...]
    """A usage with one of these fields has this shape."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cached: str
    written: str
    """Empty if there is no such field."""
    details: str | None = None
    """The field that contains `cached` and `written`; None if they are beside the totals."""
    apart: bool = False
    """Whether `cached` and `written` are added to `inputs`; otherwise they are a part of it."""
    total: str = "total_tokens"
    """The field for all tokens together, if a usage has it."""


SHAPES = (
    # OpenAI chat completions, and everything that imitates them
    Shape(
        ("prompt_tokens", "completion_tokens"),
        ("prompt_tokens",),
        ("completion_tokens",),
        "cached_tokens",
        "cache_write_tokens",
        details="prompt_tokens_details",
    ),
    # Anthropic messages
    Shape(
        ("cache_read_input_tokens", "cache_creation_input_tokens"),
        ("input_tokens",),
        ("output_tokens",),
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
        apart=True,
    ),
    # OpenAI responses
    Shape(
        ("input_tokens_details",),
        ("input_tokens",),
        ("output_tokens",),
        "cached_tokens",
        "cache_write_tokens",
        details="input_tokens_details",
    ),
    # LangChain messages
    Shape(
        ("input_token_details",),
        ("input_tokens",),
        ("output_tokens",),
        "cache_read",
        "cache_creation",
        details="input_token_details",
    ),
    # pydantic-ai, and other formats with two totals
    Shape(
        ("input_tokens", "output_tokens"),
        ("input_tokens",),
        ("output_tokens",),
        "cache_read_tokens",
        "cache_write_tokens",
    ),
    # Google Gemini
    Shape(
        ("prompt_token_count", "candidates_token_count"),
        ("prompt_token_count", "tool_use_prompt_token_count"),
        ("candidates_token_count", "thoughts_token_count"),
        "cached_content_token_count",
        "",
        total="total_token_count",
    ),
    # the same in the JSON of its API
    Shape(
        ("promptTokenCount", "candidatesTokenCount"),
        ("promptTokenCount", "toolUsePromptTokenCount"),
        ("candidatesTokenCount", "thoughtsTokenCount"),
        "cachedContentTokenCount",
        "",
        total="totalTokenCount",
    ),
    # Bedrock's Converse
    Shape(
        ("inputTokens", "outputTokens"),
        ("inputTokens",),
        ("outputTokens",),
        "cacheReadInputTokens",
        "cacheWriteInputTokens",
        apart=True,
        total="totalTokens",
    ),
    # the metrics of an invocation of Bedrock
    Shape(
        ("inputTokenCount", "outputTokenCount"),
        ("inputTokenCount",),
        ("outputTokenCount",),
        "cacheReadInputTokenCount",
        "cacheWriteInputTokenCount",
        apart=True,
    ),
    # Amazon's embeddings
    Shape(("inputTextTokenCount",), ("inputTextTokenCount",), (), "", ""),
    # Ollama
    Shape(("prompt_eval_count", "eval_count"), ("prompt_eval_count",), ("eval_count",), "", ""),
)
"""Tried from top to bottom."""

_HOLDERS = ("usage", "usage_metadata", "usageMetadata")
_MARKS = tuple(dict.fromkeys(mark for shape in SHAPES for mark in shape.marks))
_DETAILS = tuple(dict.fromkeys(name for shape in SHAPES for name in (shape.cached, shape.written) if name))
WITHOUT_USAGE = {type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset}
"""Types whose instances never have a usage; hot paths test it before they call `read_usage`.

Modules add their own types that wrap results of calls which are already paid for.
"""


def read_usage(value: object) -> Usage | None:
    """Return the usage that `value` reports; None if it reports none, or an invalid one."""
    try:
        kind = type(value)
        if kind in WITHOUT_USAGE or _cannot_have_usage(kind):  # type: ignore[arg-type]  # a class is hashable
            return None
        if isinstance(value, Reported):
            return _of_report(value)
        return _of_usage(value) if isinstance(value, Usage) else _of_response(value)
    except Exception:  # a foreign property may raise anything: a successful call must not fail on its bill
        return None


def _of_response(response: object) -> Usage | None:
    if type(held := getattr(response, "usage", None)) is Usage:
        return _of_usage(held)
    get = _getter(response, _HOLDERS)
    for name in _HOLDERS:
        holder = get(name)
        if isinstance(holder, MethodType):
            holder = holder() if _is_pydantic_ai(response) else None
        if holder is not None and (usage := _of_counts(holder, response, get)) is not None:
            return usage
    return None


def _of_report(report: Reported[object]) -> Usage | None:
    """Return the reported usage; counts and model that it leaves out come from the value it wraps."""
    reported = _of_usage(report.usage)
    if reported is None or reported.total_tokens or isinstance(report.value, Reported):
        return reported
    found = read_usage(report.value)
    if found is None:
        return reported
    cost_nanos = found.cost_nanos if reported.cost_nanos is None else reported.cost_nanos
    return replace(found, model=reported.model or found.model, cost_nanos=cost_nanos)


def _of_usage(usage: Usage) -> Usage | None:
    """Return `usage` if it is valid: it may have been created without `Usage.of`."""
    inputs, cached, written = usage.input_tokens, usage.cached_input_tokens, usage.cache_write_tokens
    if not _are_counts(inputs, usage.output_tokens, cached, written):
        return None
    if usage.cost_nanos is not None and not _is_count(usage.cost_nanos, MAX_NANOS):
        return None
    if usage.model is not None and _name(usage.model) is None:
        usage = replace(usage, model=None)
    if cached + written <= inputs:
        return usage
    cached, written = _parts(inputs, cached, written)
    return replace(usage, cached_input_tokens=cached, cache_write_tokens=written)


def _of_counts(holder: object, response: object, get_of_response: Get) -> Usage | None:
    """Return the counts of `holder`, with the model that `response` names."""
    if isinstance(holder, Usage):
        return _of_usage(holder)
    if type(holder) in WITHOUT_USAGE:
        return None
    get = _getter(holder, _MARKS)
    for shape in SHAPES:
        for mark in shape.marks:
            if get(mark) is not None:
                return _of_shape(get, shape, _model_of(response, get_of_response))
    return None


def _of_shape(get: Get, shape: Shape, model: str | None) -> Usage | None:
    inputs, outputs = _sum(get, shape.inputs), _sum(get, shape.outputs)
    if inputs is None and outputs is None:
        return None
    inputs, outputs = inputs or 0, outputs or 0
    if shape.apart:
        cached, written = _sum(get, (shape.cached,)) or 0, _sum(get, (shape.written,)) or 0
        inputs += cached + written
    else:
        cached, written = _parts(inputs, *_details(get, shape))
    total = get(shape.total)
    if _is_count(total):
        outputs = max(outputs, total - inputs)
    return Usage(inputs, outputs, cached, written, model)


def _sum(get: Get, names: tuple[str, ...]) -> int | None:
    total: int | None = None
    for name in names:
        count = get(name)
        if _is_count(count):
            total = count if total is None else total + count
        elif count is not None:
            raise InvalidValue(name, type(count), "a whole number of tokens")
    return total


def _details(get: Get, shape: Shape) -> tuple[object, object]:
    if shape.details is not None:
        holder = get(shape.details)
        if holder is None:
            return None, None
        get = _getter(holder, _DETAILS)
    return get(shape.cached), get(shape.written)


def _parts(inputs: int, cached: object, written: object) -> tuple[int, int]:
    """Return cached and written tokens, together at most `inputs`; the more expensive kind, written, comes first."""
    cached_tokens = cached if _is_count(cached) else 0
    written_tokens = written if _is_count(written) else 0
    if cached_tokens + written_tokens <= inputs:
        return cached_tokens, written_tokens
    written_tokens = min(written_tokens, inputs)
    return min(cached_tokens, inputs - written_tokens), written_tokens


def _is_count(value: object, most: int = MAX_TOKENS) -> TypeGuard[int]:
    # Exactly an int: a subclass may override comparison and addition, and bool is one.
    return type(value) is int and 0 <= value <= most


def _are_counts(inputs: object, outputs: object, cached: object, written: object) -> bool:
    """Whether each is a count, as in `_is_count`; in one expression, since it runs for every model call."""
    return (
        type(inputs) is type(outputs) is type(cached) is type(written) is int
        and 0 <= inputs <= MAX_TOKENS
        and 0 <= outputs <= MAX_TOKENS
        and (not cached or 0 < cached <= MAX_TOKENS)
        and (not written or 0 < written <= MAX_TOKENS)
    )


def _getter(holder: object, wanted: Iterable[str]) -> Get:
    """Return a function that reads a field of `holder`, by key or by attribute; None for a missing field."""
    if type(holder) is dict:
        return holder.get
    held = getattr(holder, "__dict__", None)
    if type(held) is dict:
        # Reading a model object's own dictionary avoids its slow lookup of missing fields.
        for name in wanted:
            if name in held:
                return held.get
    if isinstance(holder, Mapping):
        return holder.get
    return lambda name: getattr(holder, name, None)


def _peek(holder: object, name: str) -> object:
    """Return a field of `holder`; None if it is missing or reading it fails."""
    try:
        return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
    except Exception:
        return None


@lru_cache(maxsize=1024)
def _cannot_have_usage(kind: type) -> bool:
    """Whether no instance of `kind` ever has a usage; known only for pydantic models without extra fields.

    These also need it most: looking up a missing field of such a model takes microseconds.
    """
    if "__pydantic_fields__" not in type.__getattribute__(kind, "__dict__"):
        return False
    config = getattr(kind, "model_config", None)
    if not isinstance(config, dict) or config.get("extra") == "allow":
        return False
    own = [vars(base) for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("pydantic", "builtins")]
    fields = getattr(kind, "__pydantic_fields__", ())
    names = {*fields, *(name for attributes in own for name in attributes)}
    return names.isdisjoint((*_HOLDERS, "__getattr__", "__getattribute__"))


def _model_of(response: object, get: Get) -> str | None:
    try:
        if (name := _name(get("model"))) is not None:
            return name
    except Exception:  # an unreadable name does not invalidate the counts
        pass
    metadata = _peek(response, "response_metadata")
    nested = _peek(response, "response") if _is_pydantic_ai(response) else None
    given = (
        *(_peek(response, field) for field in ("model", "model_name", "model_version", "modelVersion")),
        *(_peek(metadata, field) for field in ("model_name", "model")),
        _peek(nested, "model_name"),
    )
    return next((name for name in map(_name, given) if name is not None), None)


def _name(value: object) -> str | None:
    return str.__str__(value) if isinstance(value, str) and 0 < len(value) <= MAX_NAME else None


def _is_pydantic_ai(value: object) -> bool:
    return str(type(value).__module__).partition(".")[0] == "pydantic_ai"


_FREE_NAMES = frozenset(
    {"ConnectError", "ConnectTimeout", "ConnectTimeoutError", "NewConnectionError", "ClientConnectorError"}
)
"""Class names of HTTP clients' errors for a connection that never opened."""
_COSTLY_NAMES = frozenset({"APITimeoutError", "MidStreamFallbackError"})
"""The first may wrap a connection that never opened, but earlier attempts by the client may have been billed. The
second, of LiteLLM, has a status although the stream had begun."""
_UNANSWERED_NAMES = frozenset({"APIConnectionError"})
"""No server answered: the status 500 that LiteLLM gives its error is not the status of an answer."""
_BODY_CODE_NAMES = frozenset({"OpenAIError"})
"""Their `code` is from the body of an answer, or of an event inside a stream, and is no HTTP status."""
FREE_STATUSES = frozenset(range(400, 500)) - {408, 499} | {500, 503, 529}
"""Statuses of error answers that cost nothing, in our reading: no provider's statement about it was found.

The request was refused, or the model failed before it answered. With every other status, an intermediary may have
given up while the model worked: 408, 499, 502, 504, 520 to 528.
"""


def is_free_failure(error: BaseException) -> bool:
    """Whether `error` is known to have cost nothing: an answer with a free status, never connected, or marked as free.

    The first of the error and its causes with such information decides. `penstock_free` on an exception, True or False,
    takes precedence over its other attributes.
    """
    if not isinstance(error, Exception):
        return False
    for link in _causes(error):
        verdict = _is_free(link)
        if verdict is not None:
            return verdict
    return False


def usage_of_failure(error: BaseException) -> Usage | None:
    """Return the usage of a failed call from `usage`, `completion` or `cost_usd` of the error or one of its causes."""
    for link in _causes(error):
        usage = _usage_on(link, "usage") or _usage_on(link, "completion")
        cost_nanos = _cost_on(link)
        if cost_nanos is not None:
            return replace(usage, cost_nanos=cost_nanos) if usage else Usage(cost_nanos=cost_nanos)
        if usage is not None:
            return usage
    return None


def retry_after_s(error: BaseException, now: datetime | None = None) -> float | None:
    """Return the pause in seconds that the server requested, from 0 to an hour; dates are read only with `now`."""
    for link in _causes(error):
        response = _peek(link, "response")
        for seconds in (
            _seconds(_peek(link, "retry_after"), now),
            _from_headers(_peek(link, "headers"), now),
            _from_headers(_peek(response, "headers"), now),
        ):
            if seconds is not None:
                return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    link: object = error
    for _ in range(MAX_CHAIN):
        if not isinstance(link, BaseException):
            return
        yield link
        link = _peek(link, "__cause__")


def _is_free(error: BaseException) -> bool | None:
    mark = _peek(error, "penstock_free")
    if isinstance(mark, bool):
        return mark
    names = _class_names(error)
    if not names.isdisjoint(_COSTLY_NAMES):
        return False
    status = http_status(error)
    if status is not None:
        return status in FREE_STATUSES
    if isinstance(error, (ConnectionRefusedError, socket.gaierror)) or not names.isdisjoint(_FREE_NAMES):
        return True
    return None


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that `error` reports; None if it reports none."""
    names = _class_names(error)
    if not names.isdisjoint(_UNANSWERED_NAMES):
        return None
    response = _peek(error, "response")
    fields = ("status_code", "status", "code") if names.isdisjoint(_BODY_CODE_NAMES) else ("status_code", "status")
    given = [_peek(error, name) for name in fields]
    given += [_peek(response, name) for name in ("status_code", "status")]
    given.append(_peek(_peek(response, "ResponseMetadata"), "HTTPStatusCode"))  # botocore
    return next((int(status) for status in given if isinstance(status, int) and 100 <= status <= 599), None)


def _class_names(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}


def _usage_on(error: BaseException, field: str) -> Usage | None:
    held = _peek(error, field)
    if held is None:
        return None
    try:
        return read_usage(held) or _of_counts(held, error, partial(_peek, error))
    except Exception:
        return None


def _cost_on(error: BaseException) -> int | None:
    cost_usd = _peek(error, "cost_usd")
    try:
        return None if cost_usd is None else to_nanos(cost_usd)  # type: ignore[arg-type]  # raises for anything that is not an amount
    except Exception:
        return None


def _from_headers(headers: object, now: datetime | None) -> float | None:
    found: dict[str, object] = {}
    try:
        for name, value in islice(headers.items(), MAX_HEADERS):  # type: ignore[attr-defined]  # every client has its own
            if isinstance(name, str):
                found.setdefault(name.lower(), value)
    except Exception:
        return None
    milliseconds = _seconds(found.get("retry-after-ms"), None)
    return _seconds(found.get("retry-after"), now) if milliseconds is None else milliseconds / 1000


def _seconds(value: object, now: datetime | None) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        seconds = float(value)
    except ValueError:
        return None if now is None else _seconds_until(str(value), now)
    except OverflowError:
        return None
    return seconds if math.isfinite(seconds) else None


def _seconds_until(http_date: str, now: datetime) -> float | None:
    from email.utils import parsedate_to_datetime  # rarely needed, and slow to import

    try:
        moment = parsedate_to_datetime(http_date[:MAX_NAME])
    except Exception:
        return None
    return (_in_utc(moment) - _in_utc(now)).total_seconds()


def _in_utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
