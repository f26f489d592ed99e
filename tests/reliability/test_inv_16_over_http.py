"""INV 16 over HTTP: whenever a cancel comes, it is answered with what became of it, and never by a server error.

Under a simulated loop, each seed is one story: a run that is submitted at some time, worked on by the server that
took it or by another one, which may die, and one to three cancels at any time, also before the run is there.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import httpx2
import pytest

from penstock.chat.service import ChatService
from penstock.hosting.host import RunHost
from penstock.hosting.ports import ENDED
from penstock.server.app import create_app
from penstock.server.settings import ServerSettings
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, sim_run
from tests.hosting.graphs import Sleeper, host_with, killed
from tests.reliability.test_inv_16_early_cancel import SETTINGS, document
from tests.server.served import SECRETS, TOKENS, parse_events
from tests.soak import scaled

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(900)]

STORIES = scaled(100, soak=2_000)
RUN = "ann:r"


@dataclass
class Story:
    """What the clients received."""

    answers: list[tuple[int, str]] = field(default_factory=list)
    status: str = ""
    types: list[str] = field(default_factory=list)


def client(host: RunHost, stores: MemoryStores, clock: SimLoop) -> httpx2.AsyncClient:
    chats = ChatService(host, stores.chats, clock=clock.clock)
    app = create_app(host, chats, stores, ServerSettings(tokens=TOKENS))  # type: ignore[arg-type]
    headers = {"Authorization": f"Bearer {SECRETS['ann']}"}
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app),
        base_url="http://localhost:8642",
        headers=headers,
    )


async def story(seed: int) -> Story:
    chance, story, loop = random.Random(seed), Story(), asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    stores = MemoryStores(clock=loop.clock)
    first, other = [
        await host_with(stores, settings=SETTINGS, clock=loop.clock, worker=name, sleeper=Sleeper())
        for name in ("first", "other")
    ]
    await stores.graphs.save("nap", "ann", "nap", document(chance), now_ms=0)
    await other.start()
    if chance.random() < 0.5:
        await first.start()

    async def submit() -> None:
        await asyncio.sleep(chance.choice([0, 0, 0.5, 1]))
        await first.submit(owner="ann", graph_id="nap", run_id=RUN)

    async def cancel(ann: httpx2.AsyncClient, after_s: float) -> None:
        await asyncio.sleep(after_s)
        answer = await ann.post(f"/api/runs/{RUN}/cancel", json={"reason": "enough"})
        story.answers.append((answer.status_code, answer.json().get("result", answer.text)))

    async def die() -> None:
        await asyncio.sleep(chance.uniform(0, 3))
        await killed(other)

    async with client(first, stores, loop) as ann:
        moments = [chance.choice([0, 0.5, 1, chance.uniform(0, 7)]) for _ in range(chance.choice([1, 1, 2, 3]))]
        acts = [submit(), *(cancel(ann, moment) for moment in moments)]
        if chance.random() < 0.3:
            acts.append(die())
        await asyncio.gather(*acts)
        await first.start()
        events = parse_events((await ann.get(f"/api/runs/{RUN}/events")).text)
        story.types = [one["event"] for one in events]
        story.status = (await ann.get(f"/api/runs/{RUN}")).json()["status"]
    for host in (first, other):
        await host.close()
    return story


def test_a_cancel_over_http_at_any_time_is_answered_and_is_never_lost() -> None:
    seen: set[str] = set()
    for seed in range(STORIES):
        outcome = sim_run(lambda seed=seed: story(seed), seed=seed)  # type: ignore[misc]
        where = f"seed {seed}: {outcome}"
        assert {status for status, _ in outcome.answers} == {200}, where
        results = {result for _, result in outcome.answers}
        assert outcome.status in ENDED, where
        assert outcome.types[-1] == f"run.{outcome.status}", where
        if results - {"ended"}:
            assert outcome.status == "cancelled", where
        seen |= results
    assert seen == {"remembered", "cancelled", "already_cancelled", "ended"}
