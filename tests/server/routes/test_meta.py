"""The server about itself: the limits in force, and what clients may keep."""

from __future__ import annotations

import pytest

from penstock.hosting.host import HostSettings
from penstock.hosting.limits import RunLimits
from tests.server.served import ECHO, served


async def test_each_user_is_shown_the_limits_of_their_runs() -> None:
    settings = HostSettings(tick_s=0.05, drain_s=0, ceilings=RunLimits(max_cost_usd="5"))
    async with served(host_settings=settings) as server, server.client("vera") as vera:
        me = (await vera.get("/api/me")).json()
    assert me["default_limits"] == {"max_cost_usd": "1", "max_steps": 1_000, "timeout_s": 3_600}
    assert me["ceilings"] == {"max_cost_usd": "5"}


@pytest.mark.parametrize("path", ["/api/graphs/echo", "/api/node-types"])
async def test_what_a_client_has_is_not_sent_again_until_it_changes(path: str) -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        first = await ann.get(path)
        tag = first.headers["etag"]
        assert first.headers["cache-control"] == "private, no-cache"
        assert first.headers["vary"].startswith("Authorization")
        for known in (tag, f'"other", {tag}', tag.removeprefix("W/"), "*"):
            again = await ann.get(path, headers={"If-None-Match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert (await ann.get(path, headers={"If-None-Match": '"other"'})).json() == first.json()


async def test_a_changed_graph_is_sent_again() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("g", ECHO)
        tag = (await ann.get("/api/graphs/g")).headers["etag"]
        await server.save("g", {**ECHO, "edges": []})
        changed = await ann.get("/api/graphs/g", headers={"If-None-Match": tag})
        assert (changed.status_code, changed.json()["version"]) == (200, 2)
