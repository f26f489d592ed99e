"""A refusal is ours, and no client takes it for a broken connection."""

from __future__ import annotations

import concurrent.futures
import pickle
import sys
from types import SimpleNamespace

import anthropic
import httpx2
import openai
import pytest

from penstock import Budget, BudgetExceededError, Halted, ResourceUsage, contain
from penstock.providers import ExcessOutput, contained
from penstock.providers.reading.families import in_the_families
from penstock.runtime.billing.usage import Usage
from penstock.stops import Stop, StopReason

STOP = Stop(StopReason.BUDGET_EXCEEDED, "$1.00 spent of the $1.00 of 'main'", budget="main")


def refused() -> BudgetExceededError:
    return BudgetExceededError(ResourceUsage(), Budget(max_steps=3), STOP.message, stop=STOP, partial={"a": 1})


def test_a_refusal_is_our_error_and_an_error_of_every_loaded_client() -> None:
    plain = refused()
    made = in_the_families(plain)
    assert isinstance(made, BudgetExceededError)
    assert isinstance(made, openai.OpenAIError)
    assert isinstance(made, anthropic.AnthropicError)
    assert (str(made), made.stop, made.budget, made.partial) == (str(plain), STOP, plain.budget, {"a": 1})
    assert type(made).__name__ == "BudgetExceededError"


def test_a_refusal_is_what_botocore_passes_on_and_groq_has_as_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    class GroqError(Exception):
        """As in groq."""

    monkeypatch.setitem(sys.modules, "groq", SimpleNamespace(GroqError=GroqError))
    session = SimpleNamespace(CancelledError=concurrent.futures.CancelledError)  # as botocore imports it
    monkeypatch.setitem(sys.modules, "botocore.httpsession", session)
    made = in_the_families(refused())
    assert isinstance(made, GroqError)
    assert isinstance(made, concurrent.futures.CancelledError)
    assert isinstance(made, BudgetExceededError)


def test_a_refusal_has_a_status_that_litellm_does_not_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hasattr(in_the_families(refused()), "status_code")
    monkeypatch.setitem(sys.modules, "litellm", SimpleNamespace())
    assert in_the_families(refused()).status_code == 402  # type: ignore[attr-defined]
    excess = in_the_families(ExcessOutput("2 tokens", 1, Usage(1, 2)))
    assert not hasattr(excess, "status_code")  # it was billed, and is no refusal


def test_refusals_of_one_kind_share_a_class() -> None:
    assert type(in_the_families(refused())) is type(in_the_families(refused()))


def test_a_refusal_is_copied_as_the_plain_error() -> None:
    copy = pickle.loads(pickle.dumps(in_the_families(refused())))
    assert type(copy) is BudgetExceededError
    assert (copy.stop, copy.partial) == (STOP, {"a": 1})


def test_an_error_wrapped_by_an_older_client_is_unwrapped_at_the_end_of_the_block() -> None:
    request = httpx2.Request("POST", "http://127.0.0.1/v1/messages")
    with pytest.raises(Halted) as caught, contain() as run, contained(run):
        raise anthropic.APIConnectionError(request=request) from refused()
    assert caught.value.stop is STOP


def test_an_error_wrapped_by_groq_is_unwrapped_at_the_end_of_the_block() -> None:
    wrapping = type("APIConnectionError", (Exception,), {"__module__": "groq"})  # as groq shows its classes
    with pytest.raises(Halted) as caught, contain() as run, contained(run):
        raise wrapping("Connection error.") from refused()
    assert caught.value.stop is STOP


def test_other_errors_of_the_clients_are_left_alone() -> None:
    request = httpx2.Request("POST", "http://127.0.0.1/v1/messages")
    with pytest.raises(openai.APIConnectionError), contain() as run, contained(run):
        raise openai.APIConnectionError(request=request) from OSError("gone")
