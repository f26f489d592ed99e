"""The official google-genai package of Python."""

import json
import os
import sys

from google import genai
from google.genai import errors, types

MODEL = "fake-1"
WEATHER = types.FunctionDeclaration(name="weather", parameters_json_schema={"type": "object", "properties": {}})

retries = types.HttpRetryOptions(attempts=3, initial_delay=0.01)  # it retries only if that is wanted
client = genai.Client(http_options=types.HttpOptions(retry_options=retries))
generate = client.models.generate_content
answer = generate(model=MODEL, contents="hello")
print("generate_content:", answer.text, answer.usage_metadata.total_token_count)
stream = client.models.generate_content_stream(model=MODEL, contents="hello")
print("generate_content_stream:", "".join(chunk.text or "" for chunk in stream))
tools = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[WEATHER])])
print("tools:", generate(model=MODEL, contents="weather", config=tools).function_calls[0].args)
typed = types.GenerateContentConfig(response_mime_type="application/json", response_json_schema={"type": "object"})
print("structured output:", json.loads(generate(model=MODEL, contents="json", config=typed).text)["city"])
print("count_tokens:", client.models.count_tokens(model=MODEL, contents="hello").total_tokens > 0)
print("embed_content:", len(client.models.embed_content(model=MODEL, contents=["a"]).embeddings))
try:
    generate(model=MODEL, contents="wrong")
except errors.ClientError as error:
    print("error of the provider:", error.code)
print("retries:", len(generate(model=MODEL, contents="busy").candidates))
leaving = client.models.generate_content_stream(model=MODEL, contents="hang")
next(leaving)
leaving.close()
print("disconnect")
if "PENSTOCK_GATEWAY_URL" in os.environ:
    try:
        generate(model="dear-1", contents="hello")
        sys.exit("the call over the limit was not refused")
    except errors.ClientError as error:
        if (error.code, error.status) != (402, "RESOURCE_EXHAUSTED"):
            raise
