"""Twelve researchers, one ceiling.

A planner asks a question, twelve researchers study it at the same time, a writer sums up. Together they would spend
more than the $0.50 they are given. Every call holds its worst case before it leaves, at one ledger, so the ceiling
stands however many of them ask at once: some finish, the others are refused with the reason, and the provider's invoice
agrees with the ledger to the last digit.

    python examples/ceiling.py          about seven seconds; Ctrl-C cancels the run

No key and no network: the model is scripted (`stage/script.py`), the drawing is in `stage/live.py`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress

from stage.live import watched
from stage.report import report
from stage.script import PLAN, PRICE, TOPICS, WRITE, Prompt, ScriptedModel, Topic, search

from penstock import CancelledError, ExecutionContext, Halted, PriceBook, Stop, StopReason, contain

CEILING_USD = 0.50
INTERRUPTED = 130


async def ask(context: ExecutionContext, model: ScriptedModel, prompt: Prompt) -> str:
    """One model call; while it runs it holds the most that it can cost."""
    worst_usd = model.worst_case_usd(prompt)
    answer = await context.allm(model.answer, prompt, name=prompt.name, model=model.name, cost_hint_usd=worst_usd)
    return str(answer.output_text)


async def study(run: ExecutionContext, model: ScriptedModel, topic: Topic, findings: dict[str, str]) -> None:
    """One researcher: search, read, conclude. Where it is stopped it leaves; the call tree keeps the reason."""
    with suppress(Halted, CancelledError), run.spawn_child(topic.name) as researcher:
        await researcher.atool(search, topic, cost_hint_usd=0)
        await ask(researcher, model, topic.read)
        findings[topic.name] = await ask(researcher, model, topic.conclude)


async def research(run: ExecutionContext, model: ScriptedModel, findings: dict[str, str]) -> str:
    """The whole program: plan, fan out, sum up."""
    await ask(run, model, PLAN)
    async with asyncio.TaskGroup() as researchers:
        for topic in TOPICS:
            researchers.create_task(study(run, model, topic, findings))
    return await ask(run, model, WRITE)


async def main() -> int:
    """Run it under its limits, and show what came of it."""
    model = ScriptedModel()
    findings: dict[str, str] = {}
    stop: Stop | None = None
    run = contain(
        name="research",
        max_cost_usd=CEILING_USD,
        max_steps=60,
        timeout_s=30,
        strict=True,  # a call that does not say what it can cost is refused
        prices=PriceBook(registered={model.name: PRICE}),
    )
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(run.abort, "Ctrl-C"))
    with watched(run):
        try:
            async with run:
                await research(run, model, findings)
        except (Halted, CancelledError) as stopped:
            stop = stopped.stop
    holds = report(run, model.invoice, stop, findings, asked_for=len(TOPICS))
    if not holds:
        return 1
    return INTERRUPTED if stop is not None and stop.reason is StopReason.ABORTED else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
