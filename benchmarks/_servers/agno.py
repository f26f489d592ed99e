"""agno's AgentOS with a SQLite store: its model answers a constant, or streams words."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from benchmarks._peers import load
from benchmarks._servers.words import ANSWER, words

Model: Any = load("agno.models.base").Model
ModelResponse: Any = load("agno.models.response").ModelResponse


@dataclass
class Constant(Model):  # type: ignore[misc]
    """Answers `ANSWER`; when streaming, as many words as the last message says."""

    id: str = "constant"
    name: str = "constant"
    provider: str = "local"

    def invoke(self, *given: Any, **more: Any) -> Any:
        return ModelResponse(role="assistant", content=ANSWER)

    async def ainvoke(self, *given: Any, **more: Any) -> Any:
        return self.invoke()

    def invoke_stream(self, *given: Any, **more: Any) -> Iterator[Any]:
        yield self.invoke()

    async def ainvoke_stream(self, messages: Any, *given: Any, **more: Any) -> AsyncIterator[Any]:
        async for word in words(messages[-1].content):
            yield ModelResponse(role="assistant", content=word)

    def _parse_provider_response(self, response: Any, **more: Any) -> Any:
        return response

    def _parse_provider_response_delta(self, response: Any) -> Any:
        return response


if __name__ == "__main__":
    store = load("agno.db.sqlite").SqliteDb(db_file="agno.db")
    agent = load("agno.agent").Agent(id="a", model=Constant(), db=store, telemetry=False)
    app = load("agno.os").AgentOS(agents=[agent], telemetry=False).get_app()
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False)
