"""What nodes depend on and do not make themselves, by name in the `services` of a run.

A service that is not given may have a usual one, which stands in a package above this one and is loaded by its name
when it is needed: nodes know what they need, not who has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from penstock.errors import PenstockError
from penstock.runtime.graphs.flow_context import FlowContext


class ServiceMissing(PenstockError):
    """A node needs something that the run was not given."""

    def __init__(self, service: str, needed_for: str, hint: str) -> None:
        self.service = service
        super().__init__(f"{needed_for} needs services[{service!r}]: {hint}")


class NotOffered(PenstockError):
    """A node names something that a service does not have."""

    def __init__(self, what: str, name: str, known: Mapping[str, Any]) -> None:
        self.name = name
        listed = ", ".join(sorted(map(str, known))[:20]) or "none"
        super().__init__(f"there is no {what} {name!r}; there are: {listed}")


def named(context: FlowContext, service: str) -> Mapping[str, Any]:
    """What a service offers by name; empty if the run has none."""
    found = context.services.get(service)
    if found is None:
        return {}
    if not isinstance(found, (dict, Mapping)):  # a dict is told at once; to ask the abstract class takes longer
        raise ServiceMissing(service, "a node", f"it has to be a mapping of names, not a {type(found).__name__}")
    return found


async def usual(module: str, name: str) -> Any:
    """Something of a module above this package; ImportError if it is not there, or cannot be loaded."""
    found = await asyncio.to_thread(import_module, module)  # reads files, perhaps a whole library's
    try:
        return getattr(found, name)
    except AttributeError:
        raise ImportError(f"{module} has no {name}") from None
