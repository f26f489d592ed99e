"""Commands at a server whose model has no price: none says that its calls cost nothing."""

from __future__ import annotations

import json

from penstock.agents.scripted import ScriptedModel
from penstock.runtime.billing.usage import Usage
from tests.cli.conftest import Penstock
from tests.cli.remote.live import serving


def test_what_a_model_without_a_price_cost_is_nowhere_said_to_be_nothing(penstock: Penstock) -> None:
    with serving(model=ScriptedModel(lambda request: "Well.", usage=Usage(7, 3))) as live:
        run_id = live.start("assistant", "hello", max_cost_usd="0.5")
        assert live.ended(run_id) == "completed"
        listed = penstock("runs", "ls", "--url", live.url).out
        tail = penstock("runs", "tail", run_id, "--url", live.url).out
        shown = penstock("runs", "show", run_id, "--url", live.url).out
        document = json.loads(penstock("runs", "show", run_id, "--json", "--url", live.url).out)
        spoken = penstock("chat", "assistant", "--message", "hello", "--url", live.url)
    assert "known ≥ $0.00, unknown 1 call" in listed
    assert "success · cost unknown · 10 tokens" in tail
    assert "known ≥ $0.00, unknown 1 call · 10 tokens" in tail.splitlines()[-1]
    assert "cost     known ≥ $0.00 of $0.5, unknown 1 call\n" in shown
    assert "beware   no ceiling on money has seen what 1 call cost\n" in shown
    assert (document["cost_usd"], document["unknown_costs"]) == (0, 1)
    assert "known ≥ $0.00, unknown 1 call · 10 tokens" in spoken.err + spoken.out
