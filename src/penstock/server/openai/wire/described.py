"""What /v1 answers, as the description of the API says it: the fields to count on; there may be others.

Answers are written by `chunks` and `response`; nothing here is used to make one.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Described(BaseModel):
    """A JSON object with these fields, and maybe more."""

    model_config = ConfigDict(extra="allow")


class ModelFacts(Described):
    """A graph as a model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    penstock: dict[str, Any]


class ModelList(Described):
    """The graphs that can be run."""

    object: Literal["list"]
    data: list[ModelFacts]


class QuestionFacts(Described):
    """What a run waits for: what it asks, what about, and where to answer."""

    id: str
    node_id: str
    question: str
    value: Any
    answer: list[str]


class RunFacts(Described):
    """What OpenAI's shape has no place for: the run behind an answer."""

    run_id: str
    ignored: list[str]
    """What of the request had no effect."""
    status: str | None = None
    cost_usd: float | None = None
    stop_reason: str | None = None
    message: str | None = None
    unknown_costs: int | None = None
    unresolved_usd: float | None = None
    """What is held for calls of which nobody knows what became."""
    approvals: list[QuestionFacts] | None = None


class CompletionMessage(Described):
    """What was answered."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None


class CompletionChoice(Described):
    """The one answer."""

    index: int
    message: CompletionMessage
    finish_reason: Literal["stop", "length", "content_filter"]


class CompletionUsage(Described):
    """The tokens of all model calls of the run, and what they cost in US dollars."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cost: float | None
    unknown_costs: int | None = None


class CompletionAnswer(Described):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    metadata: dict[str, str] | None
    penstock: RunFacts


class ResponseUsage(Described):
    """The tokens of all model calls of the run, and what they cost in US dollars."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    cost: float | None
    unknown_costs: int | None = None


class ResponseError(Described):
    """Why there is no answer."""

    code: str
    message: str


class ResponseAnswer(Described):
    """A response, as it stands."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    previous_response_id: str | None
    usage: ResponseUsage | None
    penstock: RunFacts


class ResponseDeleted(Described):
    """A response is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
