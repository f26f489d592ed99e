"""The agent that `adk api_server` serves: its model answers a constant."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from benchmarks._peers import load
from benchmarks._servers.words import ANSWER

types: Any = load("google.genai.types")
BaseLlm: Any = load("google.adk.models.base_llm").BaseLlm
LlmResponse: Any = load("google.adk.models.llm_response").LlmResponse


class Constant(BaseLlm):  # type: ignore[misc]
    """Answers `ANSWER`."""

    async def generate_content_async(self, llm_request: Any, stream: bool = False) -> AsyncIterator[Any]:
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text=ANSWER)]))


root_agent = load("google.adk.agents").LlmAgent(name="a", model=Constant(model="constant"))
