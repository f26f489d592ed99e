"""A server for several tenants: each has a token, a daily budget and runs that no other tenant can see.

    python examples/tenants.py

Two tenants use one server over HTTP. One runs into the daily budget of its own; the other goes on working. An admin
sees what each has spent. The model is scripted: no key, no network; the requests go to the app without a socket.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import httpx2

from penstock import Agent, Price, PriceBook
from penstock.agents import ScriptedModel
from penstock.chat import ChatService
from penstock.hosting import HostSettings, RunHost
from penstock.nodes import Program
from penstock.server import ServerSettings, create_app
from penstock.server.auth import parse_tokens
from penstock.stores import open_stores

PRICES = PriceBook(registered={"writer": Price(1, 5)}, use_genai_prices=False)
MODEL = ScriptedModel(lambda request: f"On {request.messages[-1].text}: " + "water flows. " * 20, name="writer")
AGENT = Agent(MODEL, name="writer")
SECRETS = {name: f"{name}-" + "x" * 40 for name in ("north", "south", "boss")}
DAILY_USD = "0.0012"
"""Of each tenant."""


async def main() -> int:
    """Serve two tenants and an admin."""
    roles = {"north": "user", "south": "user", "boss": "admin"}
    tokens = parse_tokens([f"{name}:{role}:{SECRETS[name]}" for name, role in roles.items()])
    async with await open_stores("memory:") as stores:
        await stores.graphs.save("writer", "boss", "Writer", Program.of(AGENT).document(), now_ms=0)
        settings = HostSettings(owner_daily_usd=DAILY_USD, max_wait_s=1)
        host = RunHost(stores, services={"programs": {"writer": Program.of(AGENT)}}, prices=PRICES, settings=settings)
        chats = ChatService(host, stores.chats)
        async with host:
            app = create_app(host, chats, stores, ServerSettings(tokens=tokens))
            return await use(app)


async def use(app: Any) -> int:
    """Spend the budget of one tenant, then work as the other."""
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:8642") as client:

        async def ask(tenant: str, path: str, body: Any = None) -> Any:
            headers = {"Authorization": f"Bearer {SECRETS[tenant]}"}
            answer = await client.request("POST" if body else "GET", path, json=body, headers=headers)
            return answer.json() if answer.status_code < 400 else answer.status_code

        async def run(tenant: str) -> Any:
            started = await ask(tenant, "/api/runs", {"graph_id": "writer", "input": f"dams of the {tenant}"})
            await ask_stream(tenant, started["id"])
            return await ask(tenant, f"/api/runs/{started['id']}")

        async def ask_stream(tenant: str, run_id: str) -> None:
            headers = {"Authorization": f"Bearer {SECRETS[tenant]}"}
            await client.get(f"/api/runs/{run_id}/events", headers=headers)  # ends with the run

        north = [await run("north") for _ in range(6)]
        south = await run("south")
        statuses = [one["status"] for one in north]
        print(f"north      {statuses.count('completed')} completed, {statuses.count('halted')} halted by its budget")
        print(f"south      {south['status']}")
        print(f"privacy    north asks for a run of south: {await ask('north', '/api/runs/' + south['id'])}")
        spent: dict[str, float] = {}
        for one in (await ask("boss", "/api/runs"))["runs"]:
            spent[one["owner"]] = spent.get(one["owner"], 0) + float(one["cost_usd"] or 0)
        print(f"admin      {', '.join(f'{owner} ${usd:.6f}' for owner, usd in sorted(spent.items()))}")
        held = spent["north"] <= float(DAILY_USD) and "halted" in statuses and south["status"] == "completed"
        return 0 if held else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
