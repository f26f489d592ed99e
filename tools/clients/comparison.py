"""What clients and the provider see, without the gateway and under `penstock exec`.

The programs of `programs/gateway/` know nothing of a gateway. Each runs with the address of a fake provider, and then
under `penstock exec`. Both times it must print the same, and the provider must see the same requests; a call over the
limit must arrive once.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from penstock.testing.provider import FakeProviderServer, Hang, RefuseFree, Say, ToolCall, WireRequest
from penstock.testing.provider.fates import Fate
from tools.clients.running import BUILD, command_of, run_program
from tools.environments import ROOT

CLIENTS: dict[str, tuple[str, ...]] = {
    "gateway/openai_python": ("openai",),
    "gateway/anthropic_python": ("anthropic",),
    "gateway/google_python": ("google-genai",),
    "gateway/litellm_python": ("litellm", "mcp", "tenacity"),
    "gateway/openai_node": ("openai", "zod"),
    "gateway/anthropic_node": ("@anthropic-ai/sdk",),
    "gateway/google_node": ("@google/genai",),
    "gateway/vercel_node": ("ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "@ai-sdk/google", "zod"),
    "gateway/curl": (),
}
"""The packages of each program's environment; those of Node for programs that end in .mjs."""
REFUSALS = {"gateway/vercel_node": 4, "gateway/litellm_python": 3}
"""How many calls of a program are over the limit, if it is not one."""
PROVIDER_KEY = "sk-of-the-provider"
ADDED = ("max_tokens", "max_completion_tokens", "max_output_tokens", "stream_options", "generationConfig")
"""Fields in which containment sets a maximum or requests usage."""
CONNECTION = ("host", "connection", "accept-encoding", "content-length", "transfer-encoding", "accept-language")
"""Headers of one connection, which differ on both sides of any proxy."""
CREDENTIALS = ("authorization", "x-api-key", "x-goog-api-key")
CITY = {"city": "Rome", "celsius": 21}


def _fate(seen: Counter[str], request: WireRequest) -> Fate:
    """Return what the fake provider does with a request, which its last message names."""
    text = request.last_text
    seen[text] += 1
    match text:
        case "weather":
            return Say(tool_calls=(ToolCall("weather", {"city": "Rome"}),))
        case "json":
            return Say(json.dumps(CITY))
        case "wrong":
            return RefuseFree(400)
        case _ if text.startswith("busy") and seen[text] <= 2:  # a client of several APIs says which
            return RefuseFree(429, 0.01)
        case "hang":
            return Say("word " * 50, then=Hang(3))
        case _:
            return Say("a dam holds water back")


def compare(name: str) -> list[str] | None:
    """Run the program at the provider, and behind the gateway; return what it has shown, None if anything differs."""
    command = command_of(name, CLIENTS[name])
    if command is None:
        return None
    print(f"{name}: without the gateway")
    plain = _observed(name, command)
    record = BUILD / f"{name.replace('/', '_')}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    options = ["--quiet", "--max-cost", "1", "--prices", "tools.clients.prices:prices", "--record", str(record)]
    print(f"{name}: under penstock exec")
    wrapped = [sys.executable, "-m", "penstock.cli", "exec", *options, "--", *command]
    contained = _observed(name, wrapped, contained=True)
    if plain is None or contained is None:
        return None
    problems = [*_differences(plain, contained), *_wrong_refusals(name, record)]
    for problem in problems:
        print(f"{name}: {problem}")
    if problems:
        return None
    print(f"{name}: the same {len(plain[1])} requests, the same output; each refusal was sent once")
    labels = [line.partition(":")[0] for line in plain[0].splitlines()]
    return [f"{len(plain[1])} requests", "; ".join(dict.fromkeys(label for label in labels if label))]


Observed = tuple[str, list[dict[str, Any]], int]
"""What a program printed, the requests that the provider saw, and how many of them were left before their end."""


def _observed(name: str, command: list[str], *, contained: bool = False) -> Observed | None:
    with FakeProviderServer(script=partial(_fate, Counter())) as provider:
        addresses = {
            "OPENAI_BASE_URL": provider.openai_url,
            "ANTHROPIC_BASE_URL": provider.url,
            "GOOGLE_GEMINI_BASE_URL": provider.url,
            "GEMINI_API_BASE": f"{provider.url}/v1beta",
        }
        keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GOOGLE_API_KEY", "GEMINI_API_KEY"), PROVIDER_KEY)
        found = {"PYTHONPATH": str(ROOT)} if contained else {}
        printed = run_program(name, command, {**addresses, **keys, **found})
        if printed is None:
            return None
        provider.wait_until(lambda: not provider.in_flight)
        return printed, [_seen(request) for request in provider.requests], len(provider.disconnects)


def _seen(request: WireRequest) -> dict[str, Any]:
    """Return what must not differ: everything but the connection, and a maximum and usage that containment needs."""
    body = {key: value for key, value in request.fields.items() if key not in ADDED}
    headers = {key: value for key, value in request.headers.items() if key not in CONNECTION}
    keys = [headers.pop(key).removeprefix("Bearer ") for key in CREDENTIALS if key in headers]
    headers["the key"] = ", ".join(keys)  # some providers accept it in more than one header
    return {"method": request.method, "path": request.path, "query": request.query, "headers": headers, "body": body}


def _differences(plain: Observed, contained: Observed) -> Iterator[str]:
    if plain[0] != contained[0]:
        yield "it printed something else"
    if len(plain[1]) != len(contained[1]):
        yield f"the provider saw {len(plain[1])} requests without the gateway, and {len(contained[1])} with it"
    if plain[2] != contained[2]:
        yield f"{plain[2]} requests are left before their end without the gateway, and {contained[2]} with it"
    for before, after in zip(plain[1], contained[1], strict=False):
        for part, value in before.items():
            if value != after[part]:
                yield f"{before['path']}: {part} differ: {value} without the gateway, {after[part]} with it"


def _wrong_refusals(name: str, record: Path) -> Iterator[str]:
    """Yield a problem unless each call over the limit was sent once."""
    calls = json.loads(record.read_text())["calls"]
    refused = [call for call in calls if call["model"] == "dear-1"]
    if len(refused) != REFUSALS.get(name, 1):
        yield f"{REFUSALS.get(name, 1)} calls are over the limit, and {len(refused)} arrived: they were retried"
