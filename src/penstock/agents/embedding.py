"""Embedding models: texts become vectors.

An `EmbeddingModel` makes one contained, recorded call for all texts of a request: its maximum cost is held before
anything is sent, and a durable run finds the vectors in its journal. A provider implements `request`; it never looks at
budgets. There is no output to limit: a request that the budget cannot pay is refused.
"""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.agents.messages import bytes_of
from penstock.agents.model import BYTES_PER_TOKEN, _encode_usage
from penstock.errors import InvalidValue, PenstockError
from penstock.runtime import execution
from penstock.runtime.billing.usage import Usage
from penstock.runtime.call import CallSpec
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.journal import COST_UNKNOWN, Journal
from penstock.runtime.durable.keys import enter_scope
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.replay import paid, replay
from penstock.tracing.payloads import PayloadSource

MAX_TEXTS = 2_048
"""Maximum number of texts in one request."""

TextOrTokens = str | Sequence[int]
"""A text, or its tokens as the model numbers them."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequest(PayloadSource):
    """The texts of one request."""

    texts: Sequence[TextOrTokens]
    dimensions: int | None = None
    """Length of the vectors; None leaves it to the model."""

    def _payload(self) -> Any:
        return {"input": list(self.texts)} | ({} if self.dimensions is None else {"dimensions": self.dimensions})


@dataclass(frozen=True, slots=True)
class Embeddings(PayloadSource):
    """The vectors of a request, in the order of its texts, and their usage."""

    vectors: Sequence[Sequence[float]]
    usage: Usage | None = None
    """None if the provider reported none."""
    model: str | None = None
    """The model that answered."""

    def _payload(self) -> Any:
        return {"vectors": len(self.vectors), "dimensions": len(self.vectors[0]) if self.vectors else 0}


class BadEmbeddings(PenstockError):
    """A provider answered with something other than one vector for each text."""

    def __init__(self, model: str, expected: int, why: str) -> None:
        self.model = model
        super().__init__(f"the answer of {model} is not {expected} vectors: {why}")


class EmbeddingModel:
    """A model that turns texts into vectors. Subclass it, and implement `request`."""

    retries: int = 0
    """Maximum number of retries of a failed request; each draws on the run's retry budget."""

    def __init__(self, name: str) -> None:
        self.name = name
        """The model's name, as price tables know it."""

    async def embed(
        self, context: ExecutionContext, texts: Sequence[TextOrTokens], *, dimensions: int | None = None
    ) -> Embeddings:
        """Return one vector for each text; the call is contained and recorded.

        Raises Halted or CancelledError like every call, BadEmbeddings, and the provider's exceptions.
        """
        if not 1 <= len(texts) <= MAX_TEXTS:
            raise InvalidValue("texts", len(texts), f"1 to {MAX_TEXTS:,} texts in one request")
        request = EmbeddingRequest(texts, dimensions)
        if context._run.prices.is_pending:
            await execution.load_prices(context, self.name)
        journal = context._run.journal
        if journal is None:
            found: Embeddings = (await self._call(context, request)).result()
            return found
        return await self._embed_once(journal, context, request)

    async def request(self, request: EmbeddingRequest) -> Embeddings:
        """Send the request, and return its vectors."""
        raise NotImplementedError(f"{type(self).__name__} does not implement request")

    def count_input(self, request: EmbeddingRequest) -> int:
        """The maximum number of input tokens; a cheap estimate from above."""
        return sum(_tokens_of(text) for text in request.texts)

    def _call(self, context: ExecutionContext, request: EmbeddingRequest) -> Any:
        tokens = self.count_input(request)
        cost = context._run.prices.worst_case_nanos(self.name, tokens, 0)
        spec = CallSpec("llm", self.name, cost, self.name, tokens)
        return execution.run_async(context, spec, self._checked, (request,), self.retries)

    async def _checked(self, request: EmbeddingRequest) -> Embeddings:
        answer = await self.request(request)
        if len(answer.vectors) != len(request.texts):
            raise BadEmbeddings(self.name, len(request.texts), f"it has {len(answer.vectors)}")
        return answer

    async def _embed_once(self, journal: Journal, context: ExecutionContext, request: EmbeddingRequest) -> Embeddings:
        """Return the journalled vectors; or send the request, and journal them before anything else can use them."""
        place = journal.scope().next("llm", self.name)
        if (found := journal.find(place.path)) is not None:
            return self._replayed(journal, context, request, found)
        await journal.flush()
        if failpoints.hook is not None:
            failpoints.hook("llm.before_call")
        with enter_scope(place):
            call = await self._call(context, request)
        answer: Embeddings = call.result()
        record = call.record
        value = _encode(self.name, answer) | ({COST_UNKNOWN: True} if record.cost_unknown else {})
        await journal.append(place.path, "llm", value, record.cost, record.tokens_in or 0, record.tokens_out or 0)
        return answer

    def _replayed(
        self, journal: Journal, context: ExecutionContext, request: EmbeddingRequest, found: JournalEntry
    ) -> Embeddings:
        answer = _decode(found)
        replay(journal, context, found, self.name, answer, exchanged=(request, answer))
        paid(context, answer)
        return answer


def to_base64(vector: Sequence[float]) -> str:
    """Return a vector as OpenAI encodes it: 32-bit floats, little endian, in base64."""
    return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def from_base64(encoded: str) -> list[float]:
    """Return the vector that `to_base64` has encoded; ValueError if it is not one."""
    raw = b64decode(encoded, validate=True)
    if len(raw) % 4:
        raise ValueError("not a list of 32-bit floats")
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def _tokens_of(text: TextOrTokens) -> int:
    return bytes_of(text) // BYTES_PER_TOKEN + 1 if isinstance(text, str) else len(text)


def _encode(name: str, answer: Embeddings) -> dict[str, Any]:
    return {
        "name": name,
        "vectors": [to_base64(vector) for vector in answer.vectors],
        "usage": None if answer.usage is None else _encode_usage(answer.usage),
        "model": answer.model,
    }


def _decode(entry: JournalEntry) -> Embeddings:
    value = entry.value
    usage = None if value["usage"] is None else Usage(**value["usage"])
    return Embeddings([from_base64(vector) for vector in value["vectors"]], usage, value["model"])
