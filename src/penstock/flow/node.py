"""Nodes: what steps run."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from types import FunctionType
from typing import Any, Literal, Protocol, runtime_checkable

from penstock.errors import InvalidValue
from penstock.runtime.context import ExecutionContext

Isolation = Literal["process"]

ASYNC_FLAGS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of the code of async functions."""


@runtime_checkable
class Node(Protocol):
    """Something a step can run: a function, a graph, or a class of your own with an id and `execute`.

    A node with state of its own sets `persistent = True`: then one step at a time uses it, over all graphs.
    """

    id: str

    def execute(self, context: ExecutionContext) -> Any:
        """Return the node's value, or an awaitable of it."""


class FunctionNode:
    """A function as a node: `fn(ctx)`, sync or async. Its return value is the node's value, and its errors propagate.

    A generator function, sync or async, is a streaming node: each piece is emitted as progress, and the list of the
    pieces is the node's value.
    """

    __slots__ = ("__weakref__", "blocking", "fn", "id", "is_async", "isolation", "persistent")

    def __init__(
        self,
        id: str,
        fn: Callable[[ExecutionContext], Any],
        *,
        persistent: bool = False,
        blocking: bool | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        if type(id) is not str or not id:
            raise InvalidValue("id", id, "a name")
        if not callable(fn):
            raise InvalidValue(f"fn of node {id!r}", fn, "a function that takes the context")
        self.id = id
        self.fn = fn
        self.persistent = persistent
        """Whether only one step at a time uses it."""
        self.blocking = blocking
        """Whether a sync function runs on a thread. None: if its step or its run has a time limit, or if the run was
        given a cancellation token; otherwise on the event loop, which it blocks."""
        # Most are plain functions, and `inspect` takes as long as the rest of a node.
        self.is_async = fn.__code__.co_flags & ASYNC_FLAGS != 0 if type(fn) is FunctionType else _is_async(fn)
        self.isolation = isolation
        """`process` runs the function in a process of its own, which a cancel really ends."""
        if blocking or isolation is not None:
            self._check_options()

    def _check_options(self) -> None:
        if self.isolation not in (None, "process"):
            raise InvalidValue(f"isolation of node {self.id!r}", self.isolation, "'process', or None")
        if self.is_async:
            what = "blocking" if self.blocking else "isolation"
            raise InvalidValue(f"{what} of node {self.id!r}", getattr(self, what), "left out for an async function")
        if self.isolation is not None:
            from penstock.flow.isolation import address_of

            address_of(self.fn, self.id)

    def execute(self, context: ExecutionContext) -> Any:
        """Call the function."""
        return self.fn(context)

    def __repr__(self) -> str:
        return f"FunctionNode({self.id!r}, {getattr(self.fn, '__qualname__', self.fn)})"


def type_of(node: object) -> str:
    """Return the type of a node in traces and charts: `function`, `graph`, or the name of its class."""
    return "function" if type(node) is FunctionNode else getattr(type(node), "node_type", None) or type(node).__name__


def is_stream(value: object) -> bool:
    """Whether the returned value is a stream of pieces."""
    return isinstance(value, AsyncIterator)


def _is_async(fn: Callable[..., Any]) -> bool:
    """Whether it is a coroutine function or an async generator function."""
    return inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)
