"""The client of LiteLLM, over the APIs of OpenAI, Anthropic and Google."""

import os
import sys

import litellm

litellm.suppress_debug_info = True
MODELS = ("openai/fake-1", "anthropic/fake-1", "gemini/fake-1")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def said(content):
    return [{"role": "user", "content": content}]


for model in MODELS:
    answer = litellm.completion(model, said("hello"), max_tokens=50)
    print("completion", model, answer.choices[0].message.content, answer.usage.total_tokens)
    stream = litellm.completion(model, said("hello"), max_tokens=50, stream=True)
    print("completion, streamed", model, "".join(chunk.choices[0].delta.content or "" for chunk in stream))
    asked = litellm.completion(model, said("weather"), max_tokens=50, tools=TOOLS)
    print("tools", model, asked.choices[0].message.tool_calls[0].function.arguments)
    try:
        litellm.completion(model, said("wrong"), max_tokens=50)
    except litellm.BadRequestError:
        print("error of the provider", model)
    if "PENSTOCK_GATEWAY_URL" in os.environ:
        try:
            litellm.completion(model.replace("fake", "dear"), said("hello"), max_tokens=50)
            sys.exit("the call over the limit was not refused")
        except Exception as error:  # its class depends on the API
            if getattr(error, "status_code", None) != 402:
                raise
print("embedding", len(litellm.embedding("openai/fake-1", ["a", "b"]).data))
