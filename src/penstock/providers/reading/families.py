"""Errors that pass through the official clients without being wrapped or retried.

The official clients treat any error raised below them as a broken connection: they wrap it, and most retry. Only errors
of their own base class pass unchanged. So an error raised inside them is our error and also an instance of the base
class of each loaded client: `except BudgetExceededError` catches it, and no client wraps or retries it. A cancellation
is not an Exception, and passes unchanged.

Other clients behave as follows, according to their sources. google-genai 3.3, cohere 7.3 and mistralai 3.7 retry only
errors of HTTP libraries and error responses, so ours passes. botocore 1.44 wraps every error except the cancellation of
a future, so a refusal is also an instance of that. LiteLLM 1.109 raises an error of its own, with the `status_code` of
ours: 402 and not 500. With `num_retries` it retries every error, and groq 1.7 always does: each attempt is refused, and
groq's `APIConnectionError` has ours as its cause.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, TypeVar

from penstock.errors import Halted, PenstockError

E = TypeVar("E", bound=PenstockError)

FAMILIES = (
    ("openai", "OpenAIError"),
    ("anthropic", "AnthropicError"),
    ("groq", "GroqError"),
    ("botocore.httpsession", "CancelledError"),
)
"""The module of each client, and the base class of its errors, or of the errors that it passes on."""
REFUSED_STATUS = 402
"""Payment required: the status of a refusal, for clients that look for one."""


def in_the_families(error: E) -> E:
    """Return the same error, as an instance of the base error class of each loaded client too."""
    families = tuple(
        family for module, name in FAMILIES if isinstance(family := getattr(sys.modules.get(module), name, None), type)
    )
    if not families:
        return error
    plain: type[PenstockError] = type(error)
    kind = _kind(plain, families, "litellm" in sys.modules)  # type: ignore[arg-type]  # a class is hashable
    refusal: Any = kind.__new__(kind, *error.args)
    refusal.args = error.args
    refusal.__dict__.update(error.__dict__)
    return refusal  # type: ignore[no-any-return]  # it is a subclass of E


@lru_cache(maxsize=64)
def _kind(plain: type[PenstockError], families: tuple[type, ...], has_status: bool) -> type[PenstockError]:
    def reduce(self: PenstockError) -> tuple[Any, ...]:
        # Pickle as the plain error: another process may not have the client loaded.
        copy = plain.__new__(plain, *self.args)
        copy.args = self.args
        copy.__dict__.update(self.__dict__)
        return copy.__reduce__()

    named = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    status = {"status_code": REFUSED_STATUS} if has_status and issubclass(plain, Halted) else {}
    return type(plain.__name__, (plain, *families), {**named, **status, "__reduce__": reduce})
