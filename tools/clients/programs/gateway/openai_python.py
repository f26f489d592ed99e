"""The official openai package of Python."""

import os
import sys

import openai
from pydantic import BaseModel


class City(BaseModel):
    city: str
    celsius: int


MODEL = "fake-1"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def said(content):
    return [{"role": "user", "content": content}]


with openai.OpenAI() as client:
    chat = client.chat.completions
    print("chat:", chat.create(model=MODEL, messages=said("hello"), max_tokens=20).choices[0].message.content)
    chunks = list(chat.create(model=MODEL, messages=said("hello"), stream=True))
    assert not any(chunk.usage for chunk in chunks)
    print("chat, streamed:", "".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    calls = chat.create(model=MODEL, messages=said("weather"), tools=TOOLS).choices[0].message.tool_calls
    print("tools:", calls[0].function.arguments)
    typed = chat.parse(model=MODEL, messages=said("json"), response_format=City)
    print("structured output:", typed.choices[0].message.parsed)
    print("responses:", client.responses.create(model=MODEL, input="hello").output_text)
    with client.responses.stream(model=MODEL, input="hello") as stream:
        print("responses, streamed:", stream.get_final_response().output_text)
    print("embeddings:", len(client.embeddings.create(model=MODEL, input=["a", "b"]).data))
    print("models:", client.models.list().data[0].id)
    try:
        chat.create(model=MODEL, messages=said("wrong"))
    except openai.BadRequestError:
        print("error of the provider")
    print("retries:", len(chat.create(model=MODEL, messages=said("busy")).choices))
    with chat.create(model=MODEL, messages=said("hang"), stream=True) as leaving:
        next(iter(leaving))
    print("disconnect")
    if "PENSTOCK_GATEWAY_URL" in os.environ:
        try:
            chat.create(model="dear-1", messages=said("hello"))
            sys.exit("the call over the limit was not refused")
        except openai.APIStatusError as error:
            if (error.status_code, error.code) != (402, "budget_exceeded"):
                raise
