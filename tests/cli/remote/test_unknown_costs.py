"""Commands at a server whose model has no price: none says that its calls cost nothing."""

from __future__ import annotations

import json

from penstock.agents.scripted import ScriptedModel
from penstock.runtime.billing.usage import Usage
from tests.cli.conftest import Penstock
from tests.cli.remote.live import serving


def test_calls_without_a_price_are_shown_as_unknown_cost_everywhere(penstock: Penstock) -> None:
    with serving(model=ScriptedModel(lambda request: "Well.", usage=Usage(7, 3))) as live:
        run_id = live.start("assistant", "hello", max_cost_usd="0.5")
        assert live.ended(run_id) == "completed"
        listed = penstock("runs", "ls", "--url", live.url).out
        tail = penstock("runs", "tail", run_id, "--url", live.url).out
        shown = penstock("runs", "show", run_id, "--url", live.url).out
        document = json.loads(penstock("runs", "show", run_id, "--json", "--url", live.url).out)
        spoken = penstock("chat", "assistant", "--message", "hello", "--url", live.url)
    assert "unknown (1 call)" in listed
    assert "· cost unknown · 10 tokens" in tail
    assert "unknown (1 call) · 10 tokens" in tail.splitlines()[-1]
    assert "cost     unknown (1 call) of $0.5\n" in shown
    assert "warning  the cost of 1 call is unknown and not limited\n" in shown
    assert (document["cost_usd"], document["unknown_costs"]) == (None, 1)
    assert "unknown (1 call) · 10 tokens" in spoken.err + spoken.out
