"""The models of `penstock serve`: one answers a constant, one answers word by word, both have a price."""

from __future__ import annotations

from collections.abc import AsyncIterator

from benchmarks._servers.words import ANSWER, words
from penstock import Price, Usage
from penstock.agents.messages import ToolCall
from penstock.agents.model import Model, ModelRequest, ModelResponse


class Constant(Model):
    """Answers at once."""

    async def request(self, request: ModelRequest) -> ModelResponse:
        return ModelResponse(ANSWER, (), Usage(5, 1, model=self.name), "stop", self.name)


class Words(Constant):
    """Streams as many words as the last message says."""

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[str | ToolCall | Usage | ModelResponse]:
        said = []
        async for word in words(str(request.messages[-1].content)):
            said.append(word)
            yield word
        yield ModelResponse("".join(said), (), Usage(5, len(said), model=self.name), "stop", self.name)


models = {"constant": Constant("constant"), "words": Words("words")}
prices = {name: Price("0.15", "0.60") for name in models}
