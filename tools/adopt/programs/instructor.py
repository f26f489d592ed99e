"""instructor: answers as objects, through the client it wraps."""

from __future__ import annotations

import asyncio
from typing import Any

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tools.adopt.probes import REPEATS, Site, drive, in_threads, use_tools


class Person(BaseModel):
    name: str


def how(site: Site) -> dict[str, Any]:
    hello = [{"role": "user", "content": "hello"}]
    return {"model": site.model, "messages": hello, "response_model": Person}


def single(site: Site) -> None:
    instructor.from_openai(OpenAI(base_url=site.openai_url, api_key=site.key)).create(**how(site))


def threads(site: Site) -> None:
    in_threads(lambda: single(site))


async def fanout(site: Site) -> None:
    client = instructor.from_openai(AsyncOpenAI(base_url=site.openai_url, api_key=site.key))
    await asyncio.gather(*(client.create(**how(site)) for _ in range(REPEATS)))


def streaming(site: Site) -> None:
    client = instructor.from_openai(OpenAI(base_url=site.openai_url, api_key=site.key))
    for _ in range(REPEATS):
        list(client.create_partial(**how(site)))


def ceiling(site: Site) -> None:
    for _ in range(REPEATS):
        single(site)


def cancel(site: Site) -> None:
    single(site)


async def cancel_async(site: Site) -> None:
    await instructor.from_openai(AsyncOpenAI(base_url=site.openai_url, api_key=site.key)).create(**how(site))


drive(
    "instructor",
    "instructor",
    script=use_tools,
    single=single,
    threads=threads,
    fanout=fanout,
    streaming=streaming,
    ceiling=ceiling,
    cancel=cancel,
    cancel_async=cancel_async,
)
