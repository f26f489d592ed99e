"""The official openai package: tools and structured output, by both APIs, streamed and not; a graph in Python."""

import json
import os

from openai import BadRequestError, OpenAI
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
FLAT = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}]
ASKED = [{"role": "user", "content": "How is the weather?"}]


class Weather(BaseModel):
    city: str
    celsius: int


def tools_by_chat(client: OpenAI, *, streamed: bool) -> None:
    if streamed:
        with client.chat.completions.stream(model=MODEL, messages=ASKED, tools=TOOLS) as stream:
            first = stream.get_final_completion()
    else:
        first = client.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls", first
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"sunny in {json.loads(call.function.arguments)['city']}"}
        for call in message.tool_calls
    ]
    answer = client.chat.completions.create(model=MODEL, messages=[*ASKED, message, *results], tools=TOOLS)
    assert answer.choices[0].message.content == "In Rome: sunny in Rome.", answer
    print(f"tools, chat, {'streamed' if streamed else 'whole'}")


def tools_by_responses(client: OpenAI, *, streamed: bool) -> None:
    if streamed:
        with client.responses.stream(model=MODEL, input=ASKED, tools=FLAT) as stream:
            first = stream.get_final_response()
    else:
        first = client.responses.create(model=MODEL, input=ASKED, tools=FLAT)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny in Rome"}
        for item in first.output
        if item.type == "function_call"
    ]
    last = client.responses.create(model=MODEL, input=outputs, previous_response_id=first.id, tools=FLAT)
    assert last.output_text == "In Rome: sunny in Rome.", last
    print(f"tools, responses, {'streamed' if streamed else 'whole'}")


with OpenAI(base_url=os.environ["BASE_URL"], api_key="none") as client:
    for streamed in (False, True):
        tools_by_chat(client, streamed=streamed)
        tools_by_responses(client, streamed=streamed)
    parsed = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Weather)
    assert parsed.choices[0].message.parsed == Weather(city="Rome", celsius=21), parsed
    print("structured output, chat")
    typed = client.responses.parse(model=MODEL, input=ASKED, text_format=Weather)
    assert typed.output_parsed == Weather(city="Rome", celsius=21), typed
    print("structured output, responses")
    refused = None
    try:
        client.chat.completions.create(model=MODEL, messages=ASKED, logit_bias={"50256": -100})
    except BadRequestError as error:
        refused = error
    assert refused is not None
    assert (refused.code, refused.param) == ("unsupported_parameter", "logit_bias"), refused
    print("refused parameters are named")
    loud = client.chat.completions.create(model="shouter", messages=[{"role": "user", "content": "hello"}])
    assert loud.choices[0].message.content == "HELLO", loud
    with client.chat.completions.stream(model="shouter", messages=[{"role": "user", "content": "hello"}]) as stream:
        assert stream.get_final_completion().choices[0].message.content == "HELLO"
    assert client.responses.create(model="shouter", input="hello").output_text == "HELLO"
    print("a graph in Python")
