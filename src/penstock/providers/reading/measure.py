"""Estimate the tokens of an answer from its text, and find that text in the JSON of every API.

The provider's count is known only at the end of an answer, and may be false. The estimate needs no tokenizer: four
characters are a token; a character of a dense script (Chinese, Japanese, Korean, emoji) is three quarters of one; of a
character that repeats eight times or more, 32 are a token. English has four to five characters in a token, Russian and
Hindi about three, code three to four, so that the estimate of ordinary text is at most 1.3 times the provider's count.

Knows JSON, and nothing of connections, prices or limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

WEIGHT_PER_TOKEN = 32
"""Weight of one token; weights are whole numbers."""
WEIGHT_PER_BYTE = 8
"""Maximum weight of a byte of UTF-8."""
_PLAIN, _DENSE_EXTRA, _REPEATED_LESS = 8, 16, 7
_DENSE = re.compile("[\u2e80-\uffff\U00010000-\U0010ffff]")
_MIN_RUN = 8
_RUNS = re.compile(rf"(.)\1{{{_MIN_RUN - 1},}}", re.S)

_DELTA_FIELDS = ("text", "partial_json", "thinking")
_PART_FIELDS = ("text", "thinking", "refusal", "arguments")
_MESSAGE_FIELDS = frozenset({"content", "refusal", "reasoning_content", "reasoning", "thinking"})
_PLAIN_TEXTS = ("response", "thinking", "outputText", "generation", "completion")
_OTHERS = frozenset({"candidates", "message", "output", "results", "contentBlockDelta", *_PLAIN_TEXTS})
"""Only an event with one of these fields can be one of Gemini, Ollama or Bedrock."""
_WHOLE_FIELDS = frozenset({"content", "output", "text", "response", "item", "part"})
"""Only an event with one of these fields can repeat the text of an answer."""


def weigh(text: str) -> int:
    """Return the weight of a text; see `WEIGHT_PER_TOKEN`."""
    size = len(text)
    weight = size * _PLAIN
    if not text.isascii():
        weight += len(_DENSE.findall(text)) * _DENSE_EXTRA
    if size >= _MIN_RUN:
        weight -= sum(len(run[0]) for run in _RUNS.finditer(text)) * _REPEATED_LESS
    return weight


def tokens_of(weight: int) -> int:
    """Return the tokens of a weight, rounded up."""
    return -(-weight // WEIGHT_PER_TOKEN)


def added_by(event: Mapping[str, Any]) -> list[str]:
    """Return the texts that an event adds to a stream. Called for every event; most have one short text."""
    texts: list[str] = []
    for choice in _objects(event, "choices"):
        _add_message(texts, choice.get("delta"))
        texts += _strings(choice, ("text",))
    if not _OTHERS.isdisjoint(event):
        _add_other(texts, event)
    delta = event.get("delta")
    if isinstance(delta, str):
        if str(event.get("type")).endswith(".delta"):
            texts.append(delta)
    elif isinstance(delta, dict):
        texts += _strings(delta, _DELTA_FIELDS)
    return texts


def can_repeat(event: Mapping[str, Any]) -> bool:
    """Whether an event may contain the text of a whole answer, for `whole_in`."""
    return not _WHOLE_FIELDS.isdisjoint(event)


def whole_in(body: Mapping[str, Any]) -> list[str]:
    """Return the texts of a whole answer, or of an event that repeats it."""
    texts: list[str] = []
    for choice in _objects(body, "choices"):
        _add_message(texts, choice.get("message"))
        texts += _strings(choice, ("text",))
    if not _OTHERS.isdisjoint(body):
        _add_other(texts, body)
    items = [*_objects(body, "content"), *_objects(body, "output")]
    parts = [part for item in items for name in ("content", "summary") for part in _objects(item, name)]
    for part in (*items, *parts):
        texts += _of_part(part)
    texts += _strings(body, ("text",))
    for name in ("response", "item", "part"):
        if isinstance(nested := body.get(name), dict):
            texts += _of_part(nested) if name == "part" else whole_in(nested)
    return texts


def _add_other(texts: list[str], body: Mapping[str, Any]) -> None:
    """Add the texts of Gemini, Ollama and Bedrock: these have the same fields in a stream and in a plain answer."""
    texts += _strings(body, _PLAIN_TEXTS)
    for candidate in _objects(body, "candidates"):
        if isinstance(content := candidate.get("content"), dict):
            for part in _objects(content, "parts"):
                _add_part(texts, part)
    for result in _objects(body, "results"):
        texts += _strings(result, _PLAIN_TEXTS)
    if isinstance(message := body.get("message"), dict):
        _add_message(texts, message)
    if isinstance(output := body.get("output"), dict) and isinstance(message := output.get("message"), dict):
        for part in _objects(message, "content"):
            _add_part(texts, part)
    if isinstance(block := body.get("contentBlockDelta"), dict) and isinstance(delta := block.get("delta"), dict):
        _add_part(texts, delta)


def _add_part(texts: list[str], part: Mapping[str, Any]) -> None:
    """Add a part of Gemini or Bedrock: text, reasoning, or the arguments of a tool."""
    texts += _strings(part, ("text",))
    for name, value in part.items():
        if name in ("functionCall", "toolUse", "reasoningContent", "executableCode", "codeExecutionResult"):
            texts.append(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _add_message(texts: list[str], message: object) -> None:
    if not isinstance(message, dict):
        return
    for name, value in message.items():
        if isinstance(value, str):
            # Servers differ in the name of the reasoning, and some send the same text under both.
            if name in _MESSAGE_FIELDS and not (name == "reasoning" and message.get("reasoning_content")):
                texts.append(value)
        elif name == "content":
            for part in _objects(message, name):
                texts += _of_part(part)
        elif name == "tool_calls":
            for call in _objects(message, name):
                if isinstance(function := call.get("function"), dict):
                    texts += _strings(function, ("arguments",))
                    if isinstance(arguments := function.get("arguments"), dict):  # of Ollama
                        texts.append(json.dumps(arguments, ensure_ascii=False, separators=(",", ":")))


def _of_part(part: Mapping[str, Any]) -> list[str]:
    """Return text, thinking and tool arguments: a string in Responses, an object in Messages."""
    texts = _strings(part, _PART_FIELDS)
    if isinstance(given := part.get("input"), dict):
        texts.append(json.dumps(given, ensure_ascii=False, separators=(",", ":")))
    return texts


def _strings(holder: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    return [text for name in names if isinstance(text := holder.get(name), str)]


def _objects(holder: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    held = holder.get(name)
    return [item for item in held if isinstance(item, dict)] if isinstance(held, list) else []
