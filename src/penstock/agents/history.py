"""The conversation that a program answers, for graphs written in Python.

A graph that runs in a chat receives the newest message as its input. `chat_history` has the messages before it. It is a
context variable, which tasks and threads of the run inherit; steps in a process of their own do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from penstock.agents.messages import Message

_history: ContextVar[Sequence[Message]] = ContextVar("chat_history", default=())


def chat_history() -> list[Message]:
    """Return the messages before the one that this run answers, oldest first; empty outside of a chat.

    Pass them on: `await agent.run(ctx.input, ctx, history=chat_history())`.
    """
    return list(_history.get())


@contextmanager
def answering_after(messages: Sequence[Message]) -> Iterator[None]:
    """Let `chat_history` return these messages inside the block."""
    token = _history.set(messages)
    try:
        yield
    finally:
        with suppress(ValueError):  # closed from another context, where there is nothing to reset
            _history.reset(token)
