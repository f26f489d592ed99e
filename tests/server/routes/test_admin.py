"""What operators see of a running server: its checks, its settings and its figures."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock.hosting.limits import HostSettings, RunLimits
from penstock.server.routes.admin import HOST_SETTINGS, SERVER_SETTINGS
from penstock.server.settings import ServerSettings
from penstock.storage.stores import open_stores
from tests.server.served import GATE, SECRETS, TOKENS, served
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

NOT_SHOWN = {
    *("tokens", "tokens_in_database", "max_buffered_bytes", "body_timeout_s", "max_json_depth", "max_json_values"),
    *("max_headers", "max_header_bytes", "max_target_bytes", "mcp_idle_s", "heartbeat_s", "ready_timeout_s"),
}
"""Secrets, and bounds of a single request that no operator changes."""


async def got(path: str, **options: Any) -> Any:
    async with served(**options) as server, server.client("root") as root:
        answer = await root.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_setting_is_listed_or_left_out_on_purpose() -> None:
    assert {*HOST_SETTINGS} == {field.name for field in fields(HostSettings)}
    assert {*SERVER_SETTINGS} == {field.name for field in fields(ServerSettings)} - NOT_SHOWN


async def test_settings_in_force_are_listed_without_secrets() -> None:
    wanted = HostSettings(tick_s=0.05, drain_s=0, daily_usd="0.50", ceilings=RunLimits(max_cost_usd="5"), keep_days=3)
    listed = await got("/api/settings", host_settings=wanted)
    found = {setting["name"]: setting for setting in listed["settings"]}
    facts = ("section", "value", "unit", "option", "is_default")
    assert [found["daily_usd"][fact] for fact in facts] == ["money", "0.50", "usd", "--daily", False]
    assert [found["keep_days"][fact] for fact in facts] == ["storage", 3, "days", "--keep-days", False]
    assert found["ceilings"]["value"] == {"max_cost_usd": "5"}
    assert found["max_running"]["is_default"]
    assert not any(secret in str(listed) for secret in SECRETS.values())


async def test_the_checkup_says_what_is_missing_and_what_to_do() -> None:
    found = {one["name"]: one for one in (await got("/api/doctor"))["findings"]}
    assert found["penstock"]["state"] == "ok"
    assert "gate" in found["node types"]["found"]
    assert found["database"]["state"] == "missing"
    assert "--daily" in found["daily budget"]["advice"]
    assert "--cost-ceiling" in found["spending"]["advice"]
    limited = HostSettings(tick_s=0.05, drain_s=0, daily_usd="1", owner_daily_usd="0.10")
    found = {one["name"]: one for one in (await got("/api/doctor", host_settings=limited))["findings"]}
    assert not {"daily budget", "spending"} & {*found}


async def test_the_host_shows_its_figures_and_who_works() -> None:
    async with served() as server, server.client("root") as root:
        await server.save("gate", GATE)
        run = await server.host.submit(owner="ann", graph_id="gate", input="x")
        await server.gate.entered.wait()
        shown = (await root.get("/api/host")).json()
        server.gate.opened.set()
        await server.host.wait(run.id)
        after = (await root.get("/api/host")).json()
    (worker,) = shown["workers"]
    assert (worker["name"], worker["runs"], worker["is_this"]) == (shown["worker"], 1, True)
    assert worker["lease_until_ms"] > shown["now_ms"]
    assert (shown["running"], shown["queued"], shown["database"]["size_bytes"]) == (1, 0, None)
    assert shown["max_memory_bytes"] > 10_000_000
    assert (after["running"], after["totals"]["completed"], after["workers"][0]["runs"]) == (0, 1, 0)


async def test_only_admins_see_them() -> None:
    async with served(ServerSettings(tokens=TOKENS)) as server:
        for name in ("ann", "vera"):
            async with server.client(name) as client:
                for path in ("/api/doctor", "/api/settings", "/api/host"):
                    assert (await client.get(path)).status_code == 403


async def test_the_size_of_the_database_is_known(tmp_path: Path, postgres_url: str) -> None:
    for url, least in (("memory:", None), (str(tmp_path / "runs.db"), 10_000), (postgres_url, 1_000_000)):
        async with await open_stores(url) as stores:
            size = await stores.size_bytes()
        assert size is None if least is None else size is not None and size > least
