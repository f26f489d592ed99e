"""Memories of hosted runs are stored once, whichever worker dies, and read by any server."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.remote.connection import Connection
from penstock.hosting.host import HostSettings, RunHost
from penstock.nodes.memory import Memory
from penstock.storage.memory import InProcessMemory, MemoryStores
from penstock.testing import SimLoop, sim_run
from penstock.testing.faulty import FaultKind, FaultyStore
from tests.cli.service.test_serve import served
from tests.hosting.graphs import executors, graph, killed

KEEP = graph(("in", "input", {}), ("keep", "memory", {"action": "remember", "scope": "owner"}), edges="in>keep")
CALLS = [{"tool": "remember", "arguments": {"key": "height", "value": "221 m"}}, "Noted."]
TELL = graph(
    ("in", "input", {}),
    ("guide", "agent", {"model": {"script": CALLS}}),
    ("notes", "memory", {"scope": "owner"}),
    edges="in>guide",
)
TELL["edges"].append(
    {
        "id": "link",
        "source": "notes",
        "sourceHandle": "tools",
        "target": "guide",
        "targetHandle": "tools",
        "data": {"channel": "link"},
    }
)


class Deadly(InProcessMemory):
    """A memory whose writer dies, after the value is kept or before."""

    def __init__(self, kept: InProcessMemory, is_kept: bool) -> None:
        super().__init__()
        self.kept, self.is_kept = kept, is_kept
        self.reached = asyncio.Event()

    async def put(self, space: str, key: str, value: Any) -> None:
        if self.is_kept:
            await self.kept.put(space, key, value)
        self.reached.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(("document", "value"), [(KEEP, "the dam is 221 m high"), (TELL, "221 m")])
def test_a_run_whose_worker_dies_while_it_remembers_remembers_once(document: Any, value: str, is_kept: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        stores = MemoryStores(clock=loop.clock)
        await stores.graphs.save("g", "ann", "G", document, now_ms=0)
        deadly = Deadly(stores.memories, is_kept)
        first, second = (
            RunHost(
                stores,
                executors=executors(),
                services={"memory": memory},
                settings=HostSettings(tick_s=0.5, lease_s=3, drain_s=0),
                clock=loop.clock,
            )
            for memory in (deadly, stores.memories)
        )
        await first.start()
        run = await first.submit(owner="ann", graph_id="g", input="the dam is 221 m high")
        await deadly.reached.wait()
        await killed(first)
        async with second:
            ended = await second.wait(run.id)
        assert (ended.status, ended.epoch) == ("completed", 2)
        assert [one.value for one in await stores.memories.search("owner:ann", "")] == [value]

    sim_run(main, seed=1)


@pytest.mark.parametrize("kind", ["busy", "write-then-timeout"])
async def test_a_run_that_could_not_reach_its_memories_fails_and_stores_once_when_resumed(
    kind: FaultKind,
) -> None:
    stores = MemoryStores()
    await stores.graphs.save("g", "ann", "G", KEEP, now_ms=0)
    services = {"memory": FaultyStore(stores.memories, kind)}
    async with RunHost(stores, executors=executors(), services=services) as host:
        failed = await host.wait((await host.submit(owner="ann", graph_id="g", input="a dam")).id)
        assert (failed.status, "try again" in str(failed.error)) == ("failed", True)
        await host.resume(failed.id)
        assert (await host.wait(failed.id)).status == "completed"
    assert [one.value for one in await stores.memories.search("owner:ann", "")] == ["a dam"]


async def test_the_memories_of_a_run_are_removed_with_it() -> None:
    stores, document = MemoryStores(), graph(("keep", "memory", {"action": "remember", "key": "k"}))
    await stores.graphs.save("g", "ann", "G", document, now_ms=0)
    async with RunHost(stores, executors=executors(), services={"memory": stores.memories}) as host:
        run = await host.submit(owner="ann", graph_id="g", input="v")
        ended = await host.wait(run.id)
    assert ended.status == "completed"
    assert await stores.memories.get(f"run:{run.id}", "k") == Memory("k", "v")
    assert ended.ended_ms is not None
    assert await stores.runs.remove_ended(ended.ended_ms + 1) == [run.id]
    assert await stores.memories.get(f"run:{run.id}", "k") is None


NOTES = graph(
    ("in", "input", {}),
    ("keep", "memory", {"action": "remember"}),
    ("find", "memory", {"action": "recall"}),
    edges="in>keep keep>find",
)


async def test_a_fork_remembers_for_itself_and_a_replay_nothing() -> None:
    stores = MemoryStores()
    await stores.graphs.save("g", "ann", "G", NOTES, now_ms=0)
    async with RunHost(stores, executors=executors(), services={"memory": stores.memories}) as host:
        origin = {"kind": "run", "chat_id": "c"}
        run = await host.wait((await host.submit(owner="ann", graph_id="g", input="a dam", origin=origin)).id)
        replay = await host.wait((await host.replay(run.id, owner="ann")).id)
        fork = await host.wait((await host.fork(run.id, owner="ann", at="keep", input="another dam")).id)
    found = {one.id: [memory["value"] for memory in one.output] for one in (run, replay, fork)}
    assert found == {run.id: ["a dam"], replay.id: ["a dam"], fork.id: ["another dam"]}
    kept = [await stores.memories.search(space, "") for space in ("chat:c", f"run:{replay.id}", f"run:{fork.id}")]
    assert [[one.value for one in some] for some in kept] == [["a dam"], [], ["another dam"]]


def chat_answer(url: str, chat_id: str, content: str) -> Any:
    """What the graph answers in a chat."""
    with Connection(url) as server:
        run_id = str(server.post(f"/api/chats/{chat_id}/messages", {"content": content})["run_id"])
        for _ in server.events(run_id):
            pass
        return server.get(f"/api/runs/{run_id}")["output"]


@pytest.mark.usefixtures("forks")
@pytest.mark.requirement("K-16")
def test_memories_of_a_chat_are_recalled_after_the_server_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.json").write_text(json.dumps(NOTES))
    dam, question = "The dam is 221 m high", "How high is the dam?"
    with served("notes.json", "--db", "sqlite:///kept.db") as server:
        with Connection(server.url) as client:
            chat, other = (client.post("/api/chats", {"graph_id": "notes"})["id"] for _ in range(2))
        assert [one["value"] for one in chat_answer(server.url, chat, dam)] == [dam]
        assert server.stop(signal.SIGKILL)[0] == -signal.SIGKILL
    with served("notes.json", "--db", "sqlite:///kept.db") as server:
        assert [one["value"] for one in chat_answer(server.url, chat, question)] == [question, dam]
        assert [one["value"] for one in chat_answer(server.url, other, question)] == [question]
        assert server.stop(signal.SIGTERM) == (0, "")
