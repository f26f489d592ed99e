"""Check that an upstream answers and accepts its key, with a request for its models, which costs nothing."""

from __future__ import annotations

import asyncio

import httpcore2

from penstock.gateway.connections import Connections
from penstock.gateway.upstreams import Upstream
from penstock.gateway.wires import GEMINI

ANSWER_S = 10.0


class Unusable(Exception):
    """The upstream cannot be used; the message says why, and never contains the key."""


async def check_upstream(upstream: Upstream) -> str:
    """Request the upstream's models, and return a description of the outcome; raise Unusable if it cannot be used."""
    path = "/v1beta/models" if upstream.wire is GEMINI else f"{upstream.wire.root}/models"
    connections = Connections()
    try:
        async with asyncio.timeout(ANSWER_S):
            response = await connections.send("GET", upstream.target(path, ""), upstream.headers([], None), None)
            await response.aclose()
    except TimeoutError:
        raise Unusable(f"does not answer within {ANSWER_S:g} s") from None
    except (OSError, httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException) as error:
        raise Unusable(f"cannot be reached: {str(error) or type(error).__name__}") from None
    finally:
        await connections.aclose()
    if response.status in (401, 403):
        raise Unusable(f"refuses the key ({response.status})" if upstream.key else f"needs a key ({response.status})")
    if response.status >= 500 or 300 <= response.status < 400:
        raise Unusable(f"answers with {response.status}")
    return f"answers, with {'its key' if upstream.key else 'no key'}"
