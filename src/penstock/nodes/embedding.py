"""`embedding`: vectors of texts, by a model that makes them.

The input is a text, or a list of texts; tokens may stand for a text, as in OpenAI's API. Its vectors come in the same
order, as lists of numbers or in base64. An object `{"input": …, "dimensions": …}` sets the length of the vectors for
one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from penstock.agents.embedding import MAX_TEXTS, EmbeddingModel, TextOrTokens, to_base64
from penstock.errors import InvalidValue, PenstockError
from penstock.kernel.executor import DataValue, Handle, typed
from penstock.nodes.parts.services import check_allowed, import_default, service_mapping
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.settings import Checked, Data, Name, Settings, Within

TYPE = "embedding"
MAX_DIMENSIONS = 65_536
EXPECTED = f"a text or a list of 1 to {MAX_TEXTS:,} texts"

Dimensions = Annotated[int, Within(1, MAX_DIMENSIONS)]


class NoEmbeddingModel(PenstockError):
    """A node names a model that makes no embeddings."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        super().__init__(f"model {name!r} makes no embeddings: {why}")


@dataclass(frozen=True, slots=True)
class EmbeddingData(Data):
    """The model, and how its vectors are written."""

    model: Name
    dimensions: Dimensions | None = None
    """Length of the vectors; the model's own if omitted."""
    encoding: Literal["float", "base64"] = "float"
    """Lists of numbers, or base64 of 32-bit floats, which takes a third of the space."""


class EmbeddingNode(Checked[EmbeddingData]):
    """Turns texts into vectors."""

    settings = Settings(EmbeddingData)
    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> DataValue:
        """Return the vectors of the node's input; of the graph's input if no edge leads to it."""
        read = self.settings.read(data)
        given, dimensions = _given(inputs["input"].value if "input" in inputs else context.execution.input)
        texts = texts_in(given)
        offered = service_mapping(context, "models")
        if read.model not in offered:
            check_allowed(read.model, context.services)
        model = await embedding_model_among(read.model, offered)
        answer = await model.embed(context.execution, texts, dimensions=dimensions or read.dimensions)
        vectors = [to_base64(one) if read.encoding == "base64" else list(one) for one in answer.vectors]
        return typed(vectors[0] if isinstance(given, str) else vectors)


async def embedding_model_among(name: str, offered: Mapping[str, Any]) -> EmbeddingModel:
    """Return the model: one of those that are offered by name, or a provider's."""
    if name in offered:
        found = offered[name]
        if not isinstance(found, EmbeddingModel):
            raise NoEmbeddingModel(name, "it is not an EmbeddingModel")
        return found
    if "://" in name:  # the author of a graph could otherwise choose where requests, and our key with them, are sent
        raise NoEmbeddingModel(name, "a graph may not contain the address of a model: offer it under a name")
    try:
        make = await import_default("penstock.providers.models.embeddings", "embedding_model")
        made: EmbeddingModel = make(name)
    except (ImportError, InvalidValue) as error:
        raise NoEmbeddingModel(name, str(error)) from None
    return made


def embedding_document(name: str) -> dict[str, Any]:
    """Return the graph that makes embeddings with the model offered as `name`."""
    edge = {"id": "e1", "source": "in", "target": TYPE, "data": {"channel": "flow"}}
    return {
        "id": name,
        "nodes": [
            {"id": "in", "type": "input", "data": {"type": "any"}, "position": {"x": 0, "y": 0}},
            {
                "id": TYPE,
                "type": TYPE,
                "data": {"model": name, "encoding": "base64"},
                "position": {"x": 240, "y": 0},
            },
        ],
        "edges": [edge],
    }


def texts_in(given: object) -> list[TextOrTokens]:
    """Return the texts of an input: one text, a list of them, or tokens in place of each."""
    texts: list[Any] = [given] if isinstance(given, str) or _is_tokens(given) else list(_listed(given))
    if not texts or len(texts) > MAX_TEXTS or not all(_is_text(text) for text in texts):
        raise InvalidValue("input", given, f"{EXPECTED}, none of them empty")
    return texts


def _given(given: Any) -> tuple[Any, int | None]:
    if not isinstance(given, Mapping):
        return given, None
    dimensions = given.get("dimensions")
    if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= MAX_DIMENSIONS):
        raise InvalidValue("dimensions", dimensions, f"a whole number from 1 to {MAX_DIMENSIONS:,}")
    return given.get("input"), dimensions


def _listed(given: object) -> Sequence[object]:
    if not isinstance(given, list | tuple):
        raise InvalidValue("input", given, EXPECTED)
    return given


def _is_text(text: object) -> bool:
    return bool(text) if isinstance(text, str) else _is_tokens(text)


def _is_tokens(given: object) -> bool:
    return isinstance(given, list | tuple) and bool(given) and all(type(token) is int and token >= 0 for token in given)
