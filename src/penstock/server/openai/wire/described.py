"""Schemas of /v1 responses for the API description: the guaranteed fields; responses may have others.

`chunks` and `response` build the responses; these classes are not used for that.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Described(BaseModel):
    """A JSON object with at least these fields."""

    model_config = ConfigDict(extra="allow")


class ModelFacts(Described):
    """A graph as a model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    penstock: dict[str, Any]


class ModelList(Described):
    """The graphs that can run."""

    object: Literal["list"]
    data: list[ModelFacts]


class QuestionFacts(Described):
    """A question that a run waits for: its text, its subject, and the routes to answer it."""

    id: str
    node_id: str
    question: str
    value: Any
    answer: list[str]


class RunFacts(Described):
    """Data about the run that has no field in OpenAI's format."""

    run_id: str
    ignored: list[str]
    """Fields of the request that had no effect."""
    status: str | None = None
    cost_usd: float | None = None
    stop_reason: str | None = None
    message: str | None = None
    unknown_costs: int | None = None
    unresolved_usd: float | None = None
    """Amount held for calls with an unknown outcome."""
    approvals: list[QuestionFacts] | None = None


class CompletionMessage(Described):
    """The message of the answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None


class CompletionChoice(Described):
    """The only choice of a completion."""

    index: int
    message: CompletionMessage
    finish_reason: Literal["stop", "length", "content_filter", "tool_calls"]


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


class EmbeddingVector(Described):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Described):
    """The tokens of the texts, and what they cost in US dollars."""

    prompt_tokens: int
    total_tokens: int
    cost: float | None
    unknown_costs: int | None = None


class EmbeddingsAnswer(Described):
    """The vectors of the texts, in their order."""

    object: Literal["list"]
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingsUsage
    penstock: RunFacts


class ResponseUsage(Described):
    """The tokens of all model calls of the run, and what they cost in US dollars."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    cost: float | None
    unknown_costs: int | None = None


class ResponseError(Described):
    """Why the response has no answer."""

    code: str
    message: str


class ResponseAnswer(Described):
    """A response in its current state."""

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
    """Confirmation that a response was removed."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ErrorFacts(BaseModel):
    """An error in OpenAI's format."""

    message: str
    type: str
    param: str | None = None
    """The field of the request that the error is about."""
    code: str | None = None
    run_id: str | None = None
    """The run that produced no answer, if one was started."""
    penstock: dict[str, Any] | None = None
    """The outcome of the run, and its usage."""


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: ErrorFacts
