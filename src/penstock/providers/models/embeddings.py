"""Embedding models behind OpenAI's API and the servers that imitate it: `embedding_model("openai:…")`.

Requests go through the client of the provider, as those of `RemoteModel` do, with its own retries off. The size of an
answer is bounded by the number of its vectors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from penstock import checks
from penstock.agents.embedding import BadEmbeddings, EmbeddingModel, EmbeddingRequest, Embeddings, from_base64
from penstock.errors import InvalidValue
from penstock.providers.current import already_held
from penstock.providers.models.connections import Borrowed, Connections
from penstock.providers.models.names import ADDRESSED
from penstock.providers.models.remote import Library, _check_name, _sendable, _why
from penstock.providers.models.vendors import (
    COMPATIBLE_KEY,
    NO_KEY,
    OLLAMA_HOST,
    OLLAMA_URL,
    OPENAI_KEY,
    MissingKey,
    _given,
    _openai,
)
from penstock.providers.reading.bodies import UnreadableAnswer, reading
from penstock.providers.reading.meter import Allowance, ExcessOutput, JsonBody, Meter
from penstock.runtime.billing.error_bill import ErrorBill, check_error_bill, mark_bill
from penstock.runtime.billing.usage import Usage, read_usage

ENVELOPE_BYTES = 65_536
VECTOR_BYTES = 262_144
"""Allowed for each vector: 8,192 numbers of 32 characters."""
PATH = "/embeddings"


class RemoteEmbeddingModel(EmbeddingModel):
    """An embedding model behind an API; created by `embedding_model("openai:text-embedding-3-small")`."""

    def __init__(
        self,
        name: str,
        library: Library,
        connections: Connections | Borrowed,
        *,
        retries: int = 0,
        error_bill: ErrorBill | None = None,
    ) -> None:
        _check_name(name)
        super().__init__(name)
        self.retries = checks.integer("retries", retries)
        self._library = library
        self._connections = connections
        self._error_bill = check_error_bill(error_bill)

    async def request(self, request: EmbeddingRequest) -> Embeddings:
        """Send the request, and return its vectors."""
        input_tokens = self.count_input(request)
        meter = Meter(Allowance.of_data(input_tokens, ENVELOPE_BYTES + len(request.texts) * VECTOR_BYTES))
        client = await self._connections.client()
        try:
            with already_held(), reading(JsonBody(meter)):
                answered = await self._post(client, self._body(request))
        except (ExcessOutput, UnreadableAnswer) as error:
            raise BadEmbeddings(self.name, len(request.texts), _why(error)) from error
        return self._read(answered.content, len(request.texts), input_tokens)

    def _body(self, request: EmbeddingRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.name, "input": list(request.texts), "encoding_format": "base64"}
        return body if request.dimensions is None else {**body, "dimensions": request.dimensions}

    async def _post(self, client: Any, body: dict[str, Any]) -> Any:
        try:
            try:
                return await client.post(PATH, body=body, cast_to=self._library.answer)
            except UnicodeEncodeError:  # a lone surrogate; nothing was sent
                return await client.post(PATH, body=_sendable(body), cast_to=self._library.answer)
        except Exception as error:
            mark_bill(error, self._error_bill)
            raise

    def _read(self, content: bytes, expected: int, input_tokens: int) -> Embeddings:
        try:
            answer = json.loads(content)
            found = sorted(answer["data"], key=lambda one: one["index"])
            vectors = [_vector(one["embedding"]) for one in found]
        except Exception as error:  # whatever a provider sends
            raise BadEmbeddings(self.name, expected, _why(error)) from error
        usage = read_usage(answer)
        if usage is not None and not 0 < usage.input_tokens <= input_tokens:
            usage = None  # implausible: the hold is charged
        return Embeddings(vectors, None if usage is None else Usage(usage.input_tokens, 0), answer.get("model"))


def _vector(given: str | Sequence[float]) -> list[float]:
    """Return a vector; servers that imitate OpenAI may ignore the encoding, and send numbers."""
    return from_base64(given) if isinstance(given, str) else [float(number) for number in given]


def openai_embeddings(
    name: str, *, base_url: str | None = None, api_key: str | None = None, client: Any = None, **options: Any
) -> RemoteEmbeddingModel:
    """Return an embedding model of OpenAI; `client` is an AsyncOpenAI of yours."""
    if client is None and not (api_key or os.environ.get(OPENAI_KEY)):
        raise MissingKey("OpenAI", OPENAI_KEY)
    return RemoteEmbeddingModel(name, *_openai(client, _given(base_url, api_key, None)), **options)


def compatible_embeddings(
    name: str, base_url: str, *, api_key: str | None = None, **options: Any
) -> RemoteEmbeddingModel:
    """Return an embedding model of a server that imitates OpenAI's API: vLLM, llama.cpp, a gateway."""
    key = api_key or os.environ.get(COMPATIBLE_KEY) or NO_KEY
    return RemoteEmbeddingModel(name, *_openai(None, _given(base_url, key, None), is_openai=False), **options)


def _addressed(rest: str, **options: Any) -> RemoteEmbeddingModel:
    found = ADDRESSED.fullmatch(rest)
    if found is None:
        expected = "an address and a name, as openai-compatible:http://localhost:8080/v1:name"
        raise InvalidValue("model", f"openai-compatible:{rest}", expected)
    return compatible_embeddings(found["name"], found["url"], **options)


def _ollama(name: str, **options: Any) -> RemoteEmbeddingModel:
    host = os.environ.get(OLLAMA_HOST) or OLLAMA_URL
    base_url = host if "://" in host else f"http://{host}"
    return compatible_embeddings(name, f"{base_url.rstrip('/')}/v1", **options)


PROVIDERS: Mapping[str, Callable[..., RemoteEmbeddingModel]] = MappingProxyType(
    {"openai": openai_embeddings, "openai-compatible": _addressed, "ollama": _ollama}
)


def embedding_model(name: str, **options: Any) -> RemoteEmbeddingModel:
    """Return the embedding model called `name`: its provider, a colon, and the provider's name for it.

    `options` are `retries`, `error_bill`, `api_key` and, for OpenAI, `base_url` and `client`.
    """
    provider, _, rest = checks.text("model", name).partition(":")
    make = PROVIDERS.get(provider)
    if make is None or not rest.strip():
        known = ", ".join(f"{provider}:" for provider in PROVIDERS)
        expected = (
            f"a provider of embeddings and a name, such as 'openai:text-embedding-3-small'; providers are {known}"
        )
        raise InvalidValue("model", name, expected)
    return make(rest, **options)
