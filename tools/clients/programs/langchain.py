"""LangChain's ChatOpenAI: bound tools and structured output, by both APIs."""

import os

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


for responses in (False, True):
    api = "responses" if responses else "chat"
    model = ChatOpenAI(
        model=os.environ["MODEL"], base_url=os.environ["BASE_URL"], use_responses_api=responses, temperature=0
    )
    for streamed in (False, True):
        bound = model.bind_tools([weather])
        messages = [HumanMessage("How is the weather?")]
        if streamed:
            first = None
            for chunk in bound.stream(messages):
                first = chunk if first is None else first + chunk
        else:
            first = bound.invoke(messages)
        results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in first.tool_calls]
        assert len(results) == 1, first
        answer = bound.invoke([*messages, first, *results])
        assert "sunny in Rome" in str(answer.content), answer
        print(f"bound tools, {api}, {'streamed' if streamed else 'whole'}")
    for method in ("json_schema", "function_calling") if not responses else ("json_schema",):
        found = model.with_structured_output(Weather, method=method).invoke("How is the weather?")
        assert found == Weather(city="Rome", celsius=21), found
        print(f"with_structured_output, {api}, {method}")
