"""The client of LiteLLM, over the APIs of OpenAI, Anthropic and Google."""

import os
import sys

import litellm

litellm.suppress_debug_info = True
MODELS = ("openai/fake-1", "anthropic/fake-1", "gemini/fake-1")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
SCHEMA = {"name": "city", "schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
FORMAT = {"type": "json_schema", "json_schema": SCHEMA}


def said(content):
    return [{"role": "user", "content": content}]


for model in MODELS:
    api = model.partition("/")[0]
    answer = litellm.completion(model, said("hello"), max_tokens=50)
    print(f"completion, {api}:", answer.choices[0].message.content, answer.usage.total_tokens)
    stream = litellm.completion(model, said("hello"), max_tokens=50, stream=True)
    print(f"completion, streamed, {api}:", "".join(chunk.choices[0].delta.content or "" for chunk in stream))
    asked = litellm.completion(model, said("weather"), max_tokens=50, tools=TOOLS)
    print(f"tools, {api}:", asked.choices[0].message.tool_calls[0].function.arguments)
    try:
        litellm.completion(model, said("wrong"), max_tokens=50)
    except litellm.BadRequestError:
        print(f"error of the provider, {api}")
    typed = litellm.completion(model, said("json"), max_tokens=50, response_format=FORMAT)
    print(f"structured output, {api}:", typed.choices[0].message.content)
    retried = litellm.completion(model, said(f"busy, {api}"), max_tokens=50, num_retries=3)
    print(f"retries, {api}:", len(retried.choices))
    next(iter(litellm.completion(model, said("hang"), max_tokens=50, stream=True)))
    print(f"disconnect, {api}")
    if "PENSTOCK_GATEWAY_URL" in os.environ:
        try:
            litellm.completion(model.replace("fake", "dear"), said("hello"), max_tokens=50)
            sys.exit("the call over the limit was not refused")
        except Exception as error:  # its class depends on the API
            if getattr(error, "status_code", None) != 402:
                raise
for model in ("openai/fake-1", "gemini/fake-1"):
    print(f"embedding, {model.partition('/')[0]}:", len(litellm.embedding(model, ["a", "b"]).data))
