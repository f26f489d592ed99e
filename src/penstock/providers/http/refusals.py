"""How a refusal gets through a client that knows nothing of us.

The official clients take whatever is raised below them for a broken connection: they wrap it, and most try again. Only
errors of their own family pass as they are. So what is raised inside them is our error and, at the same time, one of
each family whose client is loaded: `except BudgetExceededError` catches it, and no client wraps or retries it. A
cancel is no Exception, and passes by itself.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, TypeVar

from penstock.errors import CancelledError, Halted, PenstockError
from penstock.runtime.call import Call, stopped

E = TypeVar("E", bound=PenstockError)

FAMILIES = (("openai", "OpenAIError"), ("anthropic", "AnthropicError"))
"""The module of each client, and the class that all its errors have in common."""


class ProviderStatus(PenstockError):
    """The provider answered with something else than an answer: an error, or the way to another place."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code
        self.penstock_free = True if status_code < 400 else None
        """A redirect has cost nothing; of the others, their status tells."""
        super().__init__(f"the provider answered HTTP {status_code}")


class BrokenAnswer(PenstockError):
    """The answer is not whole, or the provider said in the middle of it that something went wrong."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


def refusal_of(call: Call) -> Halted | CancelledError:
    """What tells the client's caller why the call was stopped."""
    assert call.stop is not None
    error = stopped(call.context, call.stop)
    return error if isinstance(error, CancelledError) else in_the_families(error)


def in_the_families(error: E) -> E:
    """The same error, as one that the clients loaded by now take for their own."""
    families = tuple(
        family for module, name in FAMILIES if isinstance(family := getattr(sys.modules.get(module), name, None), type)
    )
    if not families:
        return error
    plain: type[PenstockError] = type(error)
    kind = _kind(plain, families)  # type: ignore[arg-type]  # a class is hashable
    made: Any = kind.__new__(kind, *error.args)
    made.args = error.args
    made.__dict__.update(error.__dict__)
    return made  # type: ignore[no-any-return]  # it is an E and more


@lru_cache(maxsize=64)
def _kind(plain: type[PenstockError], families: tuple[type, ...]) -> type[PenstockError]:
    def reduce(self: PenstockError) -> tuple[Any, ...]:
        # Another process may have no such client: there it is the plain error.
        copy = plain.__new__(plain, *self.args)
        copy.args = self.args
        copy.__dict__.update(self.__dict__)
        return copy.__reduce__()

    named = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain.__name__, (plain, *families), {**named, "__reduce__": reduce})
