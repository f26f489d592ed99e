"""Parse a model request, and rewrite it with no more output than the budget allows.

A model call is recognised by its path and the shape of its body, whatever its host. The exact size of its input is
unknown until the provider has counted it, so an upper bound is estimated: two bytes of the body are a token, an image
is `IMAGE_TOKENS`, and tools add `TOOL_TOKENS` of instructions. English has four bytes in a token, code three, Chinese
about three. Content that the body only refers to cannot be estimated: earlier turns stored by the provider, files by
id, results of the provider's own tools. Their cost is known when the usage is reported.

Knows JSON and tokens, and nothing of HTTP libraries, prices or limits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

BYTES_PER_TOKEN = 2
IMAGE_TOKENS = 5_000
"""More than OpenAI's and Anthropic's models count for the largest image they accept."""
TOOL_TOKENS = 700
"""More than the instructions that providers add once when a request has tools."""

Api = Literal["chat", "responses", "messages"]

_IMAGES = frozenset({"image", "image_url", "input_image"})
_OPENAI_MODELS = ("gpt-", "chatgpt-", "o1", "o3", "o4")
_RETRY_COUNT = "x-stainless-retry-count"
_SDK = "x-stainless-lang"


@dataclass(frozen=True, slots=True)
class Form:
    """The request format of one API."""

    api: Api
    path: str
    """Suffix of its path."""
    marks: tuple[str, ...]
    """A body with one of these fields is of this form."""
    caps: tuple[str, ...]
    """Fields that limit the output."""


FORMS = (
    Form("chat", "/chat/completions", ("messages",), ("max_completion_tokens", "max_tokens")),
    Form("responses", "/responses", ("model", "prompt"), ("max_output_tokens",)),
    Form("messages", "/messages", ("max_tokens",), ("max_tokens",)),
)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One model call as the client requested it."""

    form: Form
    body: Mapping[str, Any]
    model: str
    """Empty if the body names no model."""
    streams: bool
    input_tokens: int
    """Upper-bound estimate."""
    output_tokens: int | None
    """Maximum output of each answer; None if the client sets none."""
    answers: int
    """Number of requested answers; all of them are billed."""
    least_output_tokens: int
    """Smallest output limit that the provider accepts."""
    attempt: int
    """1, or more if the client is retrying."""

    @property
    def adds_usage(self) -> bool:
        """Whether a usage report has to be requested for the stream because the client did not request one."""
        options = self.body.get("stream_options")
        requested = isinstance(options, dict) and options.get("include_usage")
        return self.form.api == "chat" and self.streams and not requested

    def written(self, output_tokens: int, host: str, model: str | None = None) -> bytes:
        """Return the body with at most `output_tokens` per answer, for `model` instead if given."""
        body = dict(self.body)
        if model is not None:
            body["model"] = model
        # A cap that is not an integer is replaced: a server may accept "100000" as a number.
        wanted = [cap for cap in self.form.caps if body.get(cap) is not None]
        for cap in wanted or [self._cap_for(host)]:
            body[cap] = min(output_tokens, body[cap]) if _is_count(body.get(cap)) else output_tokens
        if self.adds_usage:
            options = body.get("stream_options")
            body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()

    def _cap_for(self, host: str) -> str:
        """Return the field to add: OpenAI's newer models refuse `max_tokens`; compatible servers may know no other."""
        newest, *older = self.form.caps
        is_openai = host.endswith((".openai.com", ".azure.com")) or self.model.startswith(_OPENAI_MODELS)
        return newest if is_openai or not older else older[0]


def form_of(method: str, path: str) -> Form | None:
    """Return the form of the model API that the path belongs to; None for other paths."""
    if method != "POST":
        return None
    return next((form for form in FORMS if path.rstrip("/").endswith(form.path)), None)


def parse_request(form: Form, headers: Mapping[str, str], content: bytes) -> ModelRequest | None:
    """Parse a body of that form; None if it is not a model request of that form."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or not any(mark in body for mark in form.marks):
        return None
    caps = [body[cap] for cap in form.caps if _is_count(body.get(cap))]
    model, thinking = body.get("model"), body.get("thinking")
    thoughts = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    return ModelRequest(
        form=form,
        body=body,
        model=model if isinstance(model, str) else "",
        streams=body.get("stream") is True,
        input_tokens=_most_input_tokens(body, len(content)),
        output_tokens=min(caps) if caps else None,
        answers=_answers(body.get("n")),
        least_output_tokens=thoughts + 1 if _is_count(thoughts) else 1,
        attempt=_attempt(headers),
    )


def is_from_an_sdk(method: str, path: str, headers: Mapping[str, str]) -> bool:
    """Whether an official client sends this request and it may be billed at a price unknown here."""
    return method == "POST" and _SDK in headers and not path.rstrip("/").endswith("/count_tokens")


def _most_input_tokens(body: Mapping[str, Any], size: int) -> int:
    images = list(_images(body))
    text = size - sum(len(json.dumps(image)) for image in images)
    tools = TOOL_TOKENS if body.get("tools") else 0
    return max(0, text) // BYTES_PER_TOKEN + 1 + len(images) * IMAGE_TOKENS + tools


def _images(root: object) -> Iterator[Mapping[str, Any]]:
    # A stack, not recursion: a conversation may be nested as deep as JSON allows.
    todo = [root]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if part.get("type") in _IMAGES:
                yield part
            else:
                todo += part.values()
        elif isinstance(part, list):
            todo += part


def _answers(wanted: object) -> int:
    """Return how many answers are billed; "5" and 5.0 count as five, since a server may accept them."""
    if isinstance(wanted, str | float):
        try:
            wanted = int(float(wanted))
        except (ValueError, OverflowError):  # not a number, or infinite: no server accepts it
            return 1
    return max(1, wanted) if _is_count(wanted) else 1


def _attempt(headers: Mapping[str, str]) -> int:
    count = headers.get(_RETRY_COUNT, "0")
    return int(count) + 1 if count.isascii() and count.isdigit() and len(count) < 4 else 1


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0
