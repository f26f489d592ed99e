"""What a call used is read from what it returned or raised, and lying figures never break a call."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.runtime.billing.usage import (
    MAX_TOKENS,
    SHAPES,
    Reported,
    Usage,
    is_free_failure,
    read_usage,
    retry_after_s,
    usage_of_failure,
)


def as_written(case: Any) -> str:
    """The case as it is written, without addresses, which are others in each process."""
    return re.sub(r" at 0x[0-9a-f]+| id='\d+'", "", repr(case))


def as_object(value: Any) -> Any:
    """The same data with attributes where there were keys."""
    if isinstance(value, Mapping):
        return SimpleNamespace(**{name: as_object(item) for name, item in value.items()})
    return value


def as_slots(value: Any) -> Any:
    """The same data on objects that have slots and no dictionary."""
    if not isinstance(value, Mapping):
        return value
    kind = type("Slotted", (), {"__slots__": tuple(value)})
    made = kind()
    for name, item in value.items():
        setattr(made, name, as_slots(item))
    return made


def chat(**counts: Any) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 100, "completion_tokens": 20, **counts}, "model": "gpt-4o"}


RESPONSES = {
    "an OpenAI chat completion": (
        chat(total_tokens=120, prompt_tokens_details={"cached_tokens": 64, "audio_tokens": None}),
        Usage(100, 20, 64, 0, "gpt-4o"),
    ),
    "a chat completion without details": (chat(prompt_tokens_details=None), Usage(100, 20, 0, 0, "gpt-4o")),
    "an OpenAI response": (
        {
            "model": "gpt-5",
            "usage": {
                "input_tokens": 50,
                "output_tokens": 7,
                "input_tokens_details": {"cached_tokens": 10, "cache_write_tokens": 5},
                "output_tokens_details": {"reasoning_tokens": 3},
            },
        },
        Usage(50, 7, 10, 5, "gpt-5"),
    ),
    "an embedding": ({"model": "e", "usage": {"prompt_tokens": 8, "total_tokens": 8}}, Usage(8, 0, 0, 0, "e")),
    "an Anthropic message": (
        {
            "model": "claude-sonnet-4-5",
            "usage": {
                "input_tokens": 10,
                "output_tokens": 5,
                "cache_creation_input_tokens": 30,
                "cache_read_input_tokens": 40,
            },
        },
        Usage(80, 5, 40, 30, "claude-sonnet-4-5"),
    ),
    "an Anthropic message that did not use the cache": (
        {
            "model": "claude",
            "usage": {
                "input_tokens": 10,
                "output_tokens": 5,
                "cache_creation_input_tokens": None,
                "cache_read_input_tokens": None,
            },
        },
        Usage(10, 5, 0, 0, "claude"),
    ),
    "a LangChain message": (
        {
            "usage_metadata": {
                "input_tokens": 350,
                "output_tokens": 240,
                "input_token_details": {"cache_creation": 200, "cache_read": 100},
            },
            "response_metadata": {"model_name": "gpt-4o-mini"},
        },
        Usage(350, 240, 100, 200, "gpt-4o-mini"),
    ),
    "a Gemini response": (
        {
            "usage_metadata": {
                "prompt_token_count": 40,
                "tool_use_prompt_token_count": 2,
                "candidates_token_count": 9,
                "thoughts_token_count": 100,
                "cached_content_token_count": 30,
            },
            "model_version": "gemini-2.5-pro",
        },
        Usage(42, 109, 30, 0, "gemini-2.5-pro"),
    ),
    "the JSON of Gemini's API": (
        {
            "usageMetadata": {
                "promptTokenCount": 40,
                "toolUsePromptTokenCount": 2,
                "candidatesTokenCount": 9,
                "thoughtsTokenCount": 100,
                "cachedContentTokenCount": 30,
                "totalTokenCount": 151,
            },
            "modelVersion": "gemini-2.5-pro",
        },
        Usage(42, 109, 30, 0, "gemini-2.5-pro"),
    ),
    "Bedrock's Converse": (
        {
            "usage": {
                "inputTokens": 10,
                "outputTokens": 5,
                "cacheReadInputTokens": 100,
                "cacheWriteInputTokens": 20,
                "totalTokens": 135,
            }
        },
        Usage(130, 5, 100, 20),
    ),
    "the metrics of an invocation of Bedrock": (
        {"usage": {"inputTokenCount": 10, "outputTokenCount": 5, "invocationLatency": 1}},
        Usage(10, 5),
    ),
    "the counts of Ollama": (
        {"model": "llama", "usage": {"prompt_eval_count": 7, "eval_count": 3}},
        Usage(7, 3, 0, 0, "llama"),
    ),
    "an embedding of Amazon": ({"usage": {"inputTextTokenCount": 7}}, Usage(7)),
    "a chat completion that leaves its reasoning out of the output": (
        chat(total_tokens=300, completion_tokens_details={"reasoning_tokens": 180}),
        Usage(100, 200, 0, 0, "gpt-4o"),
    ),
    "a chat completion without its output": (
        {"model": "m", "usage": {"prompt_tokens": 8, "total_tokens": 20}},
        Usage(8, 12, 0, 0, "m"),
    ),
    "a chat completion with a total that cannot be": (chat(total_tokens=-5), Usage(100, 20, 0, 0, "gpt-4o")),
    "a chat completion with a total below its parts": (chat(total_tokens=50), Usage(100, 20, 0, 0, "gpt-4o")),
    "a response that names no model": ({"usage": {"input_tokens": 1, "output_tokens": 2}}, Usage(1, 2)),
}


@pytest.mark.requirement("P-B2")
@pytest.mark.parametrize("dress", [dict, MappingProxyType, as_object, as_slots])
@pytest.mark.parametrize(("response", "expected"), RESPONSES.values(), ids=RESPONSES.keys())
def test_the_usage_of_a_known_response_is_read(response: Any, expected: Usage, dress: Callable[[Any], Any]) -> None:
    assert read_usage(dress(response)) == expected


@pytest.mark.requirement("P-B2")
def test_input_tokens_are_all_input_tokens_whether_the_provider_counts_the_cached_ones_in_or_not() -> None:
    counted_in = {
        "usage": {"prompt_tokens": 80, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 40}}
    }
    on_top = {"usage": {"input_tokens": 40, "output_tokens": 5, "cache_read_input_tokens": 40}}
    assert read_usage(counted_in) == read_usage(on_top) == Usage(80, 5, 40)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 7, 1.5, "usage", b"usage", ["usage"], ("usage",), {"usage"}, {}, object(), SimpleNamespace()),
        {"usage": None},
        {"usage": 5},
        {"usage": "100 tokens"},
        {"usage": {}},
        {"usage": {"total_tokens": 5}},
        {"prompt_tokens": 100, "completion_tokens": 20},
        SimpleNamespace(usage=lambda: {"input_tokens": 1, "output_tokens": 1}),
    ],
    ids=as_written,
)
def test_a_value_without_usage_fields_has_no_usage(value: object) -> None:
    assert read_usage(value) is None


LIES = [-1, True, False, 1.0, float("nan"), float("inf"), "100", b"1", Decimal(5), [], {}, object(), MAX_TOKENS + 1]


@pytest.mark.requirement("P-B2")
@pytest.mark.parametrize("lie", [*LIES, Mock(), MagicMock()], ids=lambda lie: type(lie).__name__)
@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens"])
def test_one_count_that_cannot_be_true_makes_the_usage_unknown_and_not_smaller(field: str, lie: object) -> None:
    assert read_usage(chat(**{field: lie})) is None


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: type(lie).__name__)
def test_a_lying_count_that_comes_on_top_of_the_input_makes_the_usage_unknown(lie: object) -> None:
    counts = {"input_tokens": 10, "output_tokens": 5, "cache_creation_input_tokens": 0}
    assert read_usage({"usage": {**counts, "cache_read_input_tokens": lie}}) is None


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: type(lie).__name__)
def test_a_lying_part_of_the_input_is_input_at_its_full_price(lie: object) -> None:
    assert read_usage(chat(prompt_tokens_details={"cached_tokens": lie})) == Usage(100, 20, 0, 0, "gpt-4o")


@pytest.mark.parametrize(
    ("cached", "written", "believed"),
    [(100, 0, (100, 0)), (500, 0, (100, 0)), (60, 60, (40, 60)), (500, 500, (0, 100)), (0, 101, (0, 100))],
)
def test_the_parts_of_the_input_are_never_more_than_the_input_and_the_dearer_part_is_believed_first(
    cached: int, written: int, believed: tuple[int, int]
) -> None:
    details = {"cached_tokens": cached, "cache_write_tokens": written}
    usage = read_usage(chat(prompt_tokens_details=details))
    assert usage is not None
    assert (usage.cached_input_tokens, usage.cache_write_tokens) == believed


@pytest.mark.parametrize("make", [Mock, MagicMock])
def test_an_object_with_every_attribute_has_no_usage(make: Callable[[], Any]) -> None:
    assert read_usage(make()) is None
    half = make()
    half.usage.prompt_tokens = 5
    half.usage.completion_tokens = make()
    assert read_usage(half) is None


class Broken:
    """Everything about it raises, also being shown."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class Unanswering:
    def __getattr__(self, name: str) -> Any:
        raise (AttributeError if name.startswith("_") else RuntimeError)(name)


class Endless:
    def __getattr__(self, name: str) -> Any:
        return getattr(self, name + "_")


class UnhashableClass(type):
    __hash__ = None  # type: ignore[assignment]


class OfAnUnhashableClass(metaclass=UnhashableClass):
    pass


class BrokenMapping(dict[str, Any]):
    def get(self, key: str, default: Any = None) -> Any:
        raise KeyError(key)


class RaisingUsage:
    @property
    def usage(self) -> Any:
        raise OSError("the connection is gone")


@pytest.mark.parametrize("kind", [Broken, Unanswering, Endless, OfAnUnhashableClass, BrokenMapping, RaisingUsage])
def test_a_result_that_cannot_be_read_does_not_break_the_call(kind: Callable[[], object]) -> None:
    value = kind()
    assert read_usage(value) is None
    assert read_usage({"usage": value}) is None
    assert usage_of_failure(failure(usage=value)) is None


def test_a_result_that_holds_itself_is_read_to_an_end() -> None:
    knot: dict[str, Any] = {}
    knot["usage"] = knot
    assert read_usage(knot) is None


def test_a_model_name_that_cannot_be_read_leaves_the_counts() -> None:
    class Response:
        usage = SimpleNamespace(prompt_tokens=3, completion_tokens=1)

        @property
        def model(self) -> str:
            raise RuntimeError

    assert read_usage(Response()) == Usage(3, 1)


@pytest.mark.parametrize("name", [None, 5, "", "m" * 257, b"gpt", MagicMock()], ids=lambda name: type(name).__name__)
def test_an_invalid_model_name_is_ignored(name: object) -> None:
    assert read_usage({**chat(), "model": name}) == Usage(100, 20)


def test_only_a_pydantic_ai_result_has_its_usage_method_called() -> None:
    class Result:
        def usage(self) -> Any:
            return SimpleNamespace(input_tokens=52, output_tokens=4, cache_read_tokens=10, cache_write_tokens=2)

        response = SimpleNamespace(model_name="gpt-4o")

    assert read_usage(Result()) is None
    Result.__module__ = "pydantic_ai_but_not_quite"
    assert read_usage(Result()) is None
    Result.__module__ = "pydantic_ai.run"
    assert read_usage(Result()) == Usage(52, 4, 10, 2, "gpt-4o")


def test_an_attribute_that_comes_later_is_seen() -> None:
    value = SimpleNamespace()
    assert read_usage(value) is None
    value.usage = SimpleNamespace(prompt_tokens=1, completion_tokens=1)
    assert read_usage(value) == Usage(1, 1)


def test_pydantic_models_are_read_and_refused_alike() -> None:
    pydantic = pytest.importorskip("pydantic")
    counts = {"prompt_tokens": 3, "completion_tokens": 1}
    plain = pydantic.create_model("Plain", a=(int, 1))
    typed = pydantic.create_model("Typed", usage=(dict[str, int], counts), model=(str, "m"))
    computed = type("Computed", (plain,), {"usage": property(lambda self: counts)})
    open_to_more = pydantic.create_model("Open", __config__={"extra": "allow"})
    assert [read_usage(plain()) for _ in range(2)] == [None, None]
    assert read_usage(typed()) == Usage(3, 1, model="m")
    assert read_usage(computed()) == Usage(3, 1)
    assert read_usage(open_to_more(usage=counts)) == Usage(3, 1)


NAMES = sorted(
    {"usage", "usage_metadata", "model", "response_metadata", "response"}
    | {name for shape in SHAPES for name in (*shape.marks, *shape.inputs, *shape.outputs, shape.cached, shape.written)}
    | {shape.details for shape in SHAPES if shape.details}
)
scalars = st.none() | st.booleans() | st.integers() | st.integers(0, 1000) | st.floats() | st.text(max_size=5)
garbage = st.recursive(
    scalars | st.sampled_from([Unanswering(), MagicMock(), RaisingUsage()]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6)
        | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6).map(lambda held: SimpleNamespace(**held))
    ),
    max_leaves=20,
)


@pytest.mark.requirement("P-B2")
@given(garbage)
def test_any_value_has_either_no_usage_or_a_consistent_one(value: Any) -> None:
    for usage in (read_usage(value), read_usage({"usage": value}), usage_of_failure(failure(usage=value))):
        if usage is not None:
            assert all(type(n) is int and n >= 0 for n in (usage.input_tokens, usage.output_tokens))
            assert 0 <= usage.cached_input_tokens + usage.cache_write_tokens <= usage.input_tokens
            assert min(usage.cached_input_tokens, usage.cache_write_tokens) >= 0


@given(st.builds(Usage, *[scalars] * 4, model=scalars, cost_nanos=scalars))
def test_a_usage_that_went_around_the_checks_is_checked_when_it_is_read(usage: Usage) -> None:
    believed = read_usage(usage)
    assert believed is None or believed == Usage.of(
        input_tokens=believed.input_tokens,
        output_tokens=believed.output_tokens,
        cached_input_tokens=believed.cached_input_tokens,
        cache_write_tokens=believed.cache_write_tokens,
        model=believed.model,
        cost_usd=None if believed.cost_nanos is None else Decimal(believed.cost_nanos) / 10**9,
    )


@pytest.mark.requirement("P-B2")
def test_a_function_can_report_its_cost() -> None:
    reported = Reported.of("answer", cost_usd=0.25, input_tokens=10, output_tokens=2, model="ours")
    assert reported.value == "answer"
    assert read_usage(reported) == reported.usage == Usage(10, 2, model="ours", cost_nanos=250_000_000)


def test_fields_missing_in_a_report_are_read_from_its_value() -> None:
    assert read_usage(Reported.of(chat(), cost_usd=1)) == Usage(100, 20, model="gpt-4o", cost_nanos=10**9)
    assert read_usage(Reported.of(chat(), input_tokens=1)) == Usage(1)
    assert read_usage(Reported.of("plain", cost_usd=1)) == Usage(cost_nanos=10**9)
    assert read_usage(Reported.of(Reported.of("x", input_tokens=5), cost_usd=1)) == Usage(cost_nanos=10**9)


@pytest.mark.parametrize(
    ("figures", "field"),
    [
        ({"cost_usd": float("nan")}, "cost_usd"),
        ({"cost_usd": -0.01}, "cost_usd"),
        ({"cost_usd": True}, "cost_usd"),
        ({"cost_usd": "much"}, "cost_usd"),
        ({"cost_usd": []}, "cost_usd"),
        ({"input_tokens": -1}, "input_tokens"),
        ({"input_tokens": True}, "input_tokens"),
        ({"output_tokens": 1.0}, "output_tokens"),
        ({"output_tokens": None}, "output_tokens"),
        ({"output_tokens": MAX_TOKENS + 1}, "output_tokens"),
        ({"input_tokens": 5, "cached_input_tokens": 6}, "cached_input_tokens"),
        ({"input_tokens": 5, "cached_input_tokens": 3, "cache_write_tokens": 3}, "cache_write_tokens"),
        ({"cache_write_tokens": "1"}, "cache_write_tokens"),
        ({"model": ""}, "model"),
        ({"model": 4}, "model"),
    ],
    ids=as_written,
)
def test_a_wrong_figure_is_refused_by_name(figures: dict[str, Any], field: str) -> None:
    for make in (Usage.of, lambda **given: Reported.of(None, **given)):
        with pytest.raises(InvalidValue, match=field) as caught:
            make(**figures)
        assert caught.value.field == field


class Failure(Exception):
    """Stands for a client's error; carries what a test puts on it."""


def failure(kind: type[Exception] = Failure, /, cause: BaseException | None = None, **facts: Any) -> Exception:
    error = kind("failed")
    vars(error).update(facts)
    error.__cause__ = cause
    return error


def named(name: str, *bases: type[Exception]) -> type[Exception]:
    return type(name, bases or (Exception,), {})


ConnectError = named("ConnectError")
ConnectTimeout = named("ConnectTimeout", named("TimeoutException"))
APIConnectionError = named("APIConnectionError")
APITimeoutError = named("APITimeoutError", APIConnectionError)


@pytest.mark.requirement("X-1")
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 429, 451, 500, 503, 529])
@pytest.mark.parametrize("place", ["status_code", "status", "code", "response", "botocore"])
def test_an_error_answer_with_a_free_status_was_free(place: str, status: int) -> None:
    where: dict[str, Any] = {place: status}
    if place == "response":
        where = {"response": SimpleNamespace(status_code=status)}
    elif place == "botocore":
        where = {"response": {"ResponseMetadata": {"HTTPStatusCode": status}}}
    assert is_free_failure(failure(**where))


@pytest.mark.requirement("X-10")
def test_every_status_is_free_or_may_have_been_billed() -> None:
    free = {*range(400, 499), 500, 503, 529} - {408}
    assert {status for status in range(100, 600) if is_free_failure(failure(status_code=status))} == free


@pytest.mark.requirement("X-1")
@pytest.mark.parametrize("status", [200, 302, 408, 499, 501, 502, 504, 520, 522, 524, 528])
def test_a_request_that_may_have_been_worked_on_was_not(status: int) -> None:
    assert not is_free_failure(failure(status_code=status))


@pytest.mark.parametrize("status", [True, "429", 429.0, None, 42, 4290, -429, MagicMock()], ids=as_written)
def test_an_invalid_status_is_ignored(status: object) -> None:
    assert not is_free_failure(failure(status_code=status))


@pytest.mark.requirement("X-1")
@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        socket.gaierror(-2, "no such host"),
        failure(ConnectError),
        failure(ConnectTimeout),
        failure(named("LocalConnectError", ConnectError)),
        failure(APIConnectionError, failure(ConnectError)),
        failure(APIConnectionError, failure(named("MappedError"), ConnectionRefusedError())),
        failure(Failure, failure(status_code=429)),
        failure(penstock_free=True),
        failure(penstock_free=True, status_code=504),
    ],
    ids=as_written,
)
def test_a_connection_that_never_opened_was_free(error: Exception) -> None:
    assert is_free_failure(error)


@pytest.mark.requirement("X-1")
@pytest.mark.parametrize(
    "error",
    [
        Failure(),
        ValueError(),
        TimeoutError(),
        ConnectionResetError(),
        failure(APIConnectionError),
        failure(APIConnectionError, failure(named("ReadError"))),
        failure(APITimeoutError),
        failure(APITimeoutError, failure(ConnectTimeout)),
        failure(named("ReadTimeout")),
        failure(status_code=502, cause=failure(ConnectError)),
        failure(APIConnectionError, status_code=500),
        failure(named("MidStreamFallbackError"), status_code=503),
        failure(named("APIError", named("OpenAIError")), code=429),
        failure(penstock_free=False, status_code=429),
        failure(penstock_free="yes"),
        KeyboardInterrupt(),
        SystemExit(404),
    ],
    ids=as_written,
)
def test_a_failure_is_not_free_unless_it_is_known_to_be(error: BaseException) -> None:
    assert not is_free_failure(error)


def raised(error: Exception, while_handling: Exception) -> Exception:
    """`error` as it is when it is raised inside an `except` for another."""
    with pytest.raises(type(error)) as caught:
        try:
            raise while_handling
        except Exception:
            raise error  # noqa: B904  # that it is not named as the cause is the point
    assert caught.value.__context__ is while_handling
    return caught.value


@pytest.mark.requirement("X-1")
def test_an_error_being_handled_when_the_call_began_is_ignored() -> None:
    earlier = failure(status_code=429, cost_usd=1, retry_after=5)
    fallback = raised(failure(named("ReadTimeout")), while_handling=earlier)
    assert not is_free_failure(fallback)
    assert usage_of_failure(fallback) is None
    assert retry_after_s(fallback) is None


def test_errors_that_cause_each_other_come_to_an_end() -> None:
    one, other = failure(), failure()
    one.__cause__, other.__cause__ = other, one
    assert not is_free_failure(one)
    assert usage_of_failure(one) is None
    assert retry_after_s(one) is None


@pytest.mark.requirement("P-B2")
@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, None),
        ({"usage": Usage(5, 1)}, Usage(5, 1)),
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 1}}, Usage(5, 1)),
        ({"usage": SimpleNamespace(input_tokens=5, output_tokens=1), "model": "m"}, Usage(5, 1, model="m")),
        ({"usage": chat()}, Usage(100, 20, model="gpt-4o")),
        ({"completion": as_object(chat())}, Usage(100, 20, model="gpt-4o")),
        ({"usage": Reported.of(None, cost_usd=2)}, Usage(cost_nanos=2 * 10**9)),
        ({"cost_usd": "0.5"}, Usage(cost_nanos=5 * 10**8)),
        ({"cost_usd": 0}, Usage(cost_nanos=0)),
        ({"usage": Usage(5, 1), "cost_usd": 1}, Usage(5, 1, cost_nanos=10**9)),
        ({"cost_usd": float("nan")}, None),
        ({"cost_usd": True}, None),
        ({"cost_usd": MagicMock()}, None),
        ({"usage": 5}, None),
    ],
    ids=as_written,
)
def test_a_failed_call_can_report_its_usage(facts: dict[str, Any], expected: Usage | None) -> None:
    assert usage_of_failure(failure(**facts)) == expected
    assert usage_of_failure(failure(RuntimeError, cause=failure(**facts))) == expected


NOW = datetime(2026, 11, 5, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"retry_after": 7}, 7.0),
        ({"retry_after": "1.5"}, 1.5),
        ({"retry_after": -3}, 0.0),
        ({"retry_after": 10**9}, 3600.0),
        ({"retry_after": float("nan")}, None),
        ({"retry_after": float("inf")}, None),
        ({"retry_after": 10**400}, None),
        ({"retry_after": True}, None),
        ({"retry_after": "soon"}, None),
        ({"retry_after": MagicMock()}, None),
        ({"headers": {"Retry-After": "20"}}, 20.0),
        ({"headers": {"RETRY-AFTER": "20"}}, 20.0),
        ({"response": SimpleNamespace(headers={"retry-after": "3"})}, 3.0),
        ({"headers": {"retry-after-ms": "250", "retry-after": "1"}}, 0.25),
        ({"headers": {"Retry-After": "Thu, 05 Nov 2026 12:01:30 GMT"}}, 90.0),
        ({"headers": {"Retry-After": "Thu, 05 Nov 2026 11:00:00 GMT"}}, 0.0),
        ({"headers": {"Retry-After": "Thu, 05 Nov 2099 11:00:00 GMT"}}, 3600.0),
        ({"headers": {"Retry-After": "Thu, 99 Nov 2026"}}, None),
        ({"headers": {b"retry-after": b"3"}}, None),
        ({"headers": ["retry-after"]}, None),
        ({"headers": MagicMock()}, None),
        ({"headers": Unanswering()}, None),
        ({"response": Unanswering()}, None),
        ({}, None),
    ],
    ids=lambda given: as_written(given)[:60],
)
def test_how_long_the_server_asks_to_wait(facts: dict[str, Any], expected: float | None) -> None:
    assert retry_after_s(failure(**facts), NOW) == expected


def test_a_wait_until_a_date_needs_to_know_the_time() -> None:
    error = failure(headers={"Retry-After": "Thu, 05 Nov 2026 12:01:30 GMT"})
    assert retry_after_s(error) is None
    assert retry_after_s(error, NOW.replace(tzinfo=None)) == 90.0


@given(st.dictionaries(st.sampled_from(["retry_after", "headers", "response", "cost_usd", "status_code"]), garbage))
def test_any_error_can_be_inspected(facts: dict[str, Any]) -> None:
    error = failure(**facts)
    assert is_free_failure(error) in (True, False)
    seconds = retry_after_s(error, NOW)
    assert seconds is None or 0 <= seconds <= 3600
    usage_of_failure(error)
