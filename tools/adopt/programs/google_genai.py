"""google-genai, over Gemini's own format."""

from __future__ import annotations

import asyncio
import time

from google import genai
from google.genai.types import GenerateContentConfig, HttpOptions

from penstock.adapters import contained_tools
from tools.adopt.probes import REPEATS, TOOL_S, Site, drive, in_threads

MODEL = "gemini-2.5-flash"


def client(site: Site) -> genai.Client:
    return genai.Client(api_key=site.key, http_options=HttpOptions(base_url=site.url))


def slow(query: str) -> str:
    """Search the archive."""
    time.sleep(TOOL_S)
    return "found"


def single(site: Site) -> None:
    google = client(site)  # it is closed when nothing refers to it
    google.models.generate_content(model=MODEL, contents="hello")


def embeddings(site: Site) -> None:
    google = client(site)
    for _ in range(REPEATS):
        google.models.embed_content(model="gemini-embedding-001", contents="hello")


def threads(site: Site) -> None:
    in_threads(lambda: single(site))


async def fanout(site: Site) -> None:
    google = client(site)
    await asyncio.gather(*(google.aio.models.generate_content(model=MODEL, contents="hello") for _ in range(REPEATS)))


def streaming(site: Site) -> None:
    google = client(site)
    for _ in range(REPEATS):
        list(google.models.generate_content_stream(model=MODEL, contents="hello"))


def ceiling(site: Site) -> None:
    for _ in range(REPEATS):
        single(site)


def with_tool(site: Site) -> None:
    google = client(site)
    tools = GenerateContentConfig(tools=contained_tools(site.run, [slow]))
    google.models.generate_content(model=MODEL, contents="hello", config=tools)


def cancel(site: Site) -> None:
    single(site)


async def cancel_async(site: Site) -> None:
    google = client(site)
    await google.aio.models.generate_content(model=MODEL, contents="hello")


drive(
    "google-genai",
    "google-genai",
    single=single,
    embeddings=embeddings,
    threads=threads,
    fanout=fanout,
    streaming=streaming,
    ceiling=ceiling,
    tool=with_tool,
    cancel=cancel,
    cancel_async=cancel_async,
)
