"""Pydantic AI: tools and `output_type`, by both APIs."""

import asyncio
import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    city: str
    celsius: int


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


async def main() -> None:
    provider = OpenAIProvider(base_url=os.environ["BASE_URL"], api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model, api = kind(os.environ["MODEL"], provider=provider), "chat" if kind is OpenAIChatModel else "responses"
        plain = await Agent(model, tools=[weather]).run("How is the weather?")
        assert plain.output == "In Rome: sunny in Rome.", plain.output
        print(f"tools, {api}")
        async with Agent(model, tools=[weather]).run_stream("How is the weather?") as stream:
            assert await stream.get_output() == "In Rome: sunny in Rome."
        print(f"tools, {api}, streamed")
        typed = await Agent(model, output_type=Weather, tools=[weather]).run("How is the weather?")
        assert typed.output == Weather(city="Rome", celsius=21), typed.output
        print(f"output_type by a tool, with tools, {api}")
        native = await Agent(model, output_type=NativeOutput(Weather)).run("How is the weather?")
        assert native.output == Weather(city="Rome", celsius=21), native.output
        print(f"output_type by response format, {api}")


asyncio.run(main())
