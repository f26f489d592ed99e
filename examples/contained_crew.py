"""A CrewAI crew under a ceiling: three agents, one crew after another, and not a line of the crew changed.

Needs `pip install crewai`. The model is a server on this machine that charges $0.05 a call.
"""

from __future__ import annotations

import os
from typing import Any

from penstock import BudgetExceededError, contain, contained
from penstock.testing.provider import FakeProviderServer

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("OTEL_SDK_DISABLED", "true")
try:
    from crewai import LLM, Agent, Crew, Task  # type: ignore[import-not-found]
except ImportError as missing:
    print(f"{missing}: pip install crewai")
    raise SystemExit(0) from None

CEILING_USD = 0.50


def crew(model: Any) -> Any:
    """Return a crew as CrewAI's own documentation builds one."""
    agents = [
        Agent(role=role, goal=f"be a good {role}", backstory=f"a {role}", llm=model, verbose=False)
        for role in ("researcher", "writer", "editor")
    ]
    tasks = [
        Task(description=f"Do the work of a {agent.role} on dams.", expected_output="a text", agent=agent)
        for agent in agents
    ]
    return Crew(agents=agents, tasks=tasks, verbose=False, tracing=False)


def main() -> int:
    """Let crews work until the ceiling stops them."""
    finished = 0
    with FakeProviderServer.flat(cost_usd=0.05, model="gpt-4o-mini") as server:
        model = LLM(model="openai/gpt-4o-mini", base_url=server.openai_url, api_key="none")
        with contain(max_cost_usd=CEILING_USD, prices=server.provider.prices) as run, contained(run):
            try:
                while True:
                    crew(model).kickoff()
                    finished += 1
            except BudgetExceededError as stopped:
                print(f"stopped    {stopped.reason}")
        spent = server.invoice.total_usd
    print(f"crews      {finished} finished\ninvoice    ${spent:.2f} of ${CEILING_USD:.2f}")
    return 0 if 0 < spent <= CEILING_USD and run.balance.spent_usd == spent else 1


if __name__ == "__main__":
    raise SystemExit(main())
