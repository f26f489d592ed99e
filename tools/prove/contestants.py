"""Who takes part, and what is installed for each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contestant:
    """A row of the page."""

    title: str
    packages: tuple[str, ...]
    limit: str
    """The limits of its own that its programs use."""


CONTESTANTS: dict[str, Contestant] = {
    "penstock": Contestant(
        "Penstock",
        (".[openai]", "openai==3.51.0"),
        "`contain(max_cost_usd=…, max_retries=…, timeout_s=…)`, `abort`, journal, `ChatService`",
    ),
    "langgraph": Contestant(
        "LangGraph",
        ("langgraph==1.2.20", "langchain==1.4.7", "langchain-openai==1.7.3", "langgraph-checkpoint-sqlite==3.1.2"),
        "`ModelCallLimitMiddleware`, `ToolCallLimitMiddleware`, `recursion_limit`, `step_timeout`, checkpointer; "
        "cancel through asyncio",
    ),
    "pydantic_ai": Contestant(
        "pydantic-ai",
        ("pydantic-ai-slim[openai]==2.66.0",),
        "`UsageLimits` with a shared `RunUsage`, `timeout`, `CancellationToken`, hooks",
    ),
    "openai_agents": Contestant(
        "OpenAI Agents SDK",
        ("openai-agents==0.24.0",),
        "`max_turns`, `result.cancel()`, `SQLiteSession`",
    ),
    "agno": Contestant(
        "agno",
        ("agno==3.1.10", "openai==3.51.0", "sqlalchemy[asyncio]==2.1.9"),
        "`tool_call_limit`, `retries`, `cancel_run` and asyncio's cancel, `checkpoint`, `SqliteDb`",
    ),
    "crewai": Contestant(
        "CrewAI",
        ("crewai==1.15.30",),
        "`max_iter`, `max_usage_count`, `max_retry_limit`, `max_execution_time`, `checkpoint`, event bus, "
        "conversational `Flow` with `@persist`",
    ),
    "litellm": Contestant(
        "LiteLLM proxy",
        ("litellm[proxy]==1.106.2",),
        "provider budget of the router, `num_retries`",
    ),
    "veronica_core": Contestant(
        "veronica-core",
        ("veronica-core==3.10.0", "openai==3.51.0"),
        "`ExecutionConfig` (cost, steps, retries, time), cost hints, `abort`",
    ),
}
