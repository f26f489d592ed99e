"""What comes into the handles of a node that forks, and forks of these, were given something for."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.hosting.forking import whole_input
from penstock.hosting.host import RunHost
from penstock.kernel.document import parse_graph
from penstock.storage.memory import MemoryStores
from tests.hosting.graphs import graph
from tests.hosting.test_control import with_model

JOINED = graph(
    ("a", "constant", {"value": "A"}),
    ("b", "constant", {"value": "B"}),
    ("j", "join", {}),
    ("one", "output", {}),
    edges="j>one",
)
for source, handle in (("a", "left"), ("b", "right")):
    JOINED["edges"].append(
        {**JOINED["edges"][0], "id": handle, "source": source, "target": "j", "targetHandle": handle}
    )


async def forked(host: RunHost, run_id: str, *inputs: Any) -> list[Any]:
    """What comes of a fork that is given the first of these, of a fork of that one given the second, and so on."""
    outputs = []
    for given in inputs:
        fork = await host.fork(run_id, owner="ann", at="j", **({} if given is None else {"input": given}))
        left = await host.wait(fork.id)
        outputs.append(left.output)
        run_id = left.id
    return outputs


async def test_a_fork_of_a_fork_has_in_the_handles_that_it_does_not_name_what_that_one_was_given() -> None:
    stores = MemoryStores()
    host, _ = await with_model(stores)
    await stores.graphs.save("j", "ann", "j", JOINED, now_ms=0)
    async with host:
        run = await host.wait((await host.submit(owner="ann", graph_id="j", input="hi")).id)
        assert run.output == "A+B"
        assert await forked(host, run.id, {"left": "L"}, {"right": "R"}) == ["L+B", "L+R"]
        given = [{"left": "L"}, {"right": "R"}, None, {"left": "M"}, {}]
        assert await forked(host, run.id, *given) == ["L+B", "L+R", "L+R", "M+R", "M+R"]
        fork = await host.wait((await host.fork(run.id, owner="ann", at="j", input={"left": "L"})).id)
        of_fork = await host.wait((await host.fork(fork.id, owner="ann", at="j", input={"right": "R"})).id)
        replay = await host.wait((await host.replay(of_fork.id, owner="ann")).id)
        assert replay.output == "L+R"


@pytest.mark.parametrize(
    ("at", "given", "before", "whole"),
    [
        ("j", {"right": "R"}, {"j": {"left": "L"}}, {"left": "L", "right": "R"}),
        ("j", {"left": "M"}, {"j": {"left": "L", "right": "R"}}, {"left": "M", "right": "R"}),
        ("j", {"right": "R"}, {"one": {"left": "L"}}, {"right": "R"}),
        ("one", {"right": "R"}, {"one": {"left": "L"}}, {"right": "R"}),  # an object that comes into its one handle
        ("a", {"right": "R"}, {"a": {"left": "L"}}, {"right": "R"}),
    ],
)
def test_only_an_input_by_handle_is_completed_with_recorded_values(
    at: str, given: Any, before: Any, whole: Any
) -> None:
    assert whole_input(parse_graph({"id": "j", **JOINED}), at, given, before) == whole
