"""OpenAI's Agents SDK: function tools and output types, by both APIs."""

import asyncio
import os

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: str
    celsius: int


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none")
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model, api = kind(os.environ["MODEL"], client), "chat" if kind is OpenAIChatCompletionsModel else "responses"
        agent = Agent("assistant", model=model, tools=[weather])
        result = await Runner.run(agent, "How is the weather?")
        assert result.final_output == "In Rome: sunny in Rome.", result.final_output
        print(f"function tools, {api}")
        streamed = Runner.run_streamed(agent, "How is the weather?")
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == "In Rome: sunny in Rome.", streamed.final_output
        print(f"function tools, {api}, streamed")
        typed = await Runner.run(
            Agent("typed", model=model, tools=[weather], output_type=Weather), "How is the weather?"
        )
        assert typed.final_output == Weather(city="Rome", celsius=21), typed.final_output
        print(f"output_type with tools, {api}")


asyncio.run(main())
