"""The HTTP libraries whose requests are contained, one module each, and WebSockets, which are reported."""

from __future__ import annotations

from penstock.providers.hooks import Patch
from penstock.providers.stacks import aiohttp, http_client, httpx, lm15, websockets

PATCHES: tuple[Patch, ...] = (
    *httpx.PATCHES,
    *aiohttp.PATCHES,
    *http_client.PATCHES,
    *lm15.PATCHES,
    *websockets.PATCHES,
)
