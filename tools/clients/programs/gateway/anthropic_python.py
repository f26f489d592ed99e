"""The official anthropic package of Python."""

import os
import sys

import anthropic
from pydantic import BaseModel


class City(BaseModel):
    city: str
    celsius: int


TOOLS = [{"name": "weather", "input_schema": {"type": "object", "properties": {}}}]


def body(content, **more):
    return {"model": "fake-1", "max_tokens": 50, "messages": [{"role": "user", "content": content}], **more}


with anthropic.Anthropic() as client:
    message = client.messages.create(**body("hello"))
    print("messages:", message.content[0].text, message.usage.output_tokens)
    with client.messages.stream(**body("hello")) as stream:
        print("messages, streamed:", stream.get_final_text())
    asked = client.messages.create(**body("weather", tools=TOOLS))
    print("tools:", [block.input for block in asked.content if block.type == "tool_use"])
    typed = client.messages.parse(**body("json"), output_format=City)
    print("structured output:", typed.parsed_output)
    counted = body("hello")
    del counted["max_tokens"]
    print("count_tokens:", client.messages.count_tokens(**counted).input_tokens)
    try:
        client.messages.create(**body("wrong"))
    except anthropic.BadRequestError:
        print("error of the provider")
    print("retries:", len(client.messages.create(**body("busy")).content))
    with client.messages.create(**body("hang", stream=True)) as leaving:
        next(event for event in leaving if event.type == "content_block_delta")
    print("disconnect")
    if "PENSTOCK_GATEWAY_URL" in os.environ:
        try:
            client.messages.create(**body("hello", model="dear-1"))
            sys.exit("the call over the limit was not refused")
        except anthropic.APIStatusError as error:
            if (error.status_code, error.body["error"]["type"]) != (402, "billing_error"):
                raise
