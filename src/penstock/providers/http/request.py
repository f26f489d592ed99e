"""Parse a model request, and rewrite it with no more output than the budget allows.

The exact size of its input is unknown until the provider has counted it, so an upper bound is estimated: two bytes of
the body are a token, an image is `image_tokens`, and tools add `TOOL_TOKENS` of instructions. English has four bytes in
a token, code three, Chinese about three. Content that the body only refers to cannot be estimated: earlier turns stored
by the provider, files by id, results of the provider's own tools. Their cost is known when the usage is reported.

A body that is signed (AWS SigV4), or that is no JSON, is sent as it is: its output cannot be clamped.

Knows JSON and tokens, and nothing of HTTP libraries, prices or limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from penstock.providers.http.forms import UNKNOWN, Form
from penstock.providers.http.multipart import form_fields

BYTES_PER_TOKEN = 2
IMAGE_TOKENS = 5_000
"""More than most models of OpenAI, Anthropic and Google count for the largest image they accept."""
_IMAGE_TOKENS_OF = (("gpt-4o-mini", 50_000),)
"""Models that count more, by parts of their names: gpt-4o-mini bills an image at the price of gpt-4o, in tokens."""
ORIGINAL_IMAGE_TOKENS = 20_000
"""More than a model of OpenAI counts for an image of `detail: original`: 10,000 patches, at up to 1.6 tokens each."""
TOOL_TOKENS = 700
"""More than the instructions that providers add once when a request has tools."""

DATA_BYTES = 16 * 1024 * 1024
"""Allowed for any answer that is no text."""
IMAGE_BYTES = 64 * 1024 * 1024
"""Allowed for each picture, in base64."""
AUDIO_BYTES_PER_CHARACTER = 16_384
"""Allowed for each character of speech: uncompressed, at a quarter of the speed, 13,000 bytes."""
VECTOR_BYTES = 262_144
"""Allowed for each vector: 8,192 numbers of 32 characters."""

_IMAGES = ("image", "image_url", "input_image")  # no set: the "type" of a schema may be a list, which has no hash
_GEMINI_CONFIGS = ("generationConfig", "generation_config")
COMMON_PATHS = ("messages", "ollama")
"""APIs whose paths other services have too: an unreadable body is not treated as a model request there."""
_OPENAI_MODELS = ("gpt-", "chatgpt-", "o1", "o3", "o4")
_RETRY_COUNT = "x-stainless-retry-count"
_AWS_ATTEMPT = re.compile(r"attempt=([1-9]\d{0,2})\b")
_SIGNATURES = ("AWS4-HMAC-SHA256", "AWS4-ECDSA-P256-SHA256")


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One model call as the client requested it."""

    form: Form
    body: Mapping[str, Any]
    model: str
    """Empty if the request names no model."""
    streams: bool
    input_tokens: int
    """Upper-bound estimate; for speech, the number of characters to speak."""
    output_tokens: int | None
    """Maximum output of each answer; None if the client sets none."""
    answers: int
    """Number of requested answers; all of them are billed."""
    least_output_tokens: int
    """Smallest output limit that the provider accepts."""
    attempt: int
    """1, or more if the client is retrying."""
    content: bytes = field(default=b"", repr=False)
    """The body as the client sent it."""
    shown_answers: int = 1
    """Number of answers in the response: `best_of` bills more than it returns."""
    inputs: int = 1
    """Number of texts to embed."""
    is_fixed: bool = False
    """Whether the body must be sent byte for byte: it is signed, or no JSON."""

    @property
    def adds_usage(self) -> bool:
        """Whether a usage report has to be requested for the stream because the client did not request one."""
        options = self.body.get("stream_options")
        requested = isinstance(options, dict) and options.get("include_usage")
        return self.form.api in ("chat", "completions") and self.streams and not requested and not self.is_fixed

    @property
    def is_wide(self) -> bool:
        """Whether the model answers with pictures or sound in place of text."""
        return self.form.api == "gemini" and any(word in self.model for word in ("image", "tts", "audio"))

    @property
    def max_data_bytes(self) -> int:
        """Maximum size of an answer that is no text: vectors, pictures, sound."""
        match self.form.api:
            case "images":
                return DATA_BYTES + self.answers * IMAGE_BYTES
            case "speech":
                return DATA_BYTES + self.input_tokens * AUDIO_BYTES_PER_CHARACTER
            case _:
                return DATA_BYTES + self.inputs * VECTOR_BYTES

    @property
    def is_model_fixed(self) -> bool:
        """Whether no other model can be written into the body: the path names it, or the body is not changed."""
        return self.is_fixed or bool(self.form.model or self.form.deployment)

    def written(self, output_tokens: int, host: str, model: str | None = None) -> bytes:
        """Return the body with at most `output_tokens` per answer, for `model` instead if given."""
        if self.is_fixed or (self.form.output != "text" and model is None):
            return self.content
        body = dict(self.body)
        if model is not None:
            body["model"] = model
        if self.form.output == "text":
            # A cap that is not an integer is replaced: a server may accept "100000" as a number.
            for cap in [cap for cap in self.form.caps if _at(body, cap) is not None] or [self._cap_for(host)]:
                wanted = _at(body, cap)
                _put(body, cap, min(output_tokens, wanted) if _is_count(wanted) else output_tokens)
        if self.adds_usage:
            options = body.get("stream_options")
            body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        try:
            return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can express and UTF-8 cannot
            return json.dumps(body, separators=(",", ":")).encode()

    def _cap_for(self, host: str) -> str:
        """Return the field to add: OpenAI's newer models refuse `max_tokens`; compatible servers may know no other."""
        newest, *older = self.form.caps
        if self.form.api == "chat":
            is_openai = host.endswith((".openai.com", ".azure.com")) or self.model.startswith(_OPENAI_MODELS)
            return newest if is_openai else older[0]
        return next((cap for cap in self.form.caps if cap.partition(".")[0] in self.body), newest)


def parse_request(form: Form, headers: Mapping[str, str], content: bytes) -> ModelRequest | None:
    """Parse a body of that form; None if it is not a model request of that form."""
    fields = form_fields(headers.get("content-type", ""), content)
    body = _json_object(content) if fields is None else fields
    if form.api == "unknown":
        return _unknown(form, headers, content) if _may_cost(form, fields) else None
    if body is None and form.api not in COMMON_PATHS and _may_be_json(headers, content):
        return _unknown(form, headers, content)
    if body is None or not any(body.keys() >= set(mark.split("+")) for mark in form.marks):
        return _unknown(form, headers, content) if form.is_provider else None
    form = _of_vendor(form, body)
    caps = [cap for name in form.caps if _is_count(cap := _at(body, name))]
    prompts, shown = _prompts(body) if form.api == "completions" else 1, _answers(_number(form, body))
    model = form.model or _text(body.get("model")) or form.deployment or form.default_model
    return ModelRequest(
        form=form,
        body=body,
        model=model,
        streams=_streams(form, body),
        input_tokens=_most_input_tokens(form, body, len(content), model),
        output_tokens=min(caps) if caps else form.default_cap,
        answers=prompts * max(shown, _answers(body.get("best_of"))),
        least_output_tokens=_thoughts(body) + 1,
        attempt=_attempt(headers),
        content=content,
        shown_answers=prompts * shown,
        inputs=_inputs(body),
        is_fixed=fields is not None or is_signed(headers),
    )


def _may_be_json(headers: Mapping[str, str], content: bytes) -> bool:
    """Whether a server may be able to parse a body that we cannot: compressed, too deep, or not quite JSON."""
    is_compressed = bool(headers.get("content-encoding")) or content.startswith(b"\x1f\x8b")
    return is_compressed or content.lstrip()[:1] == b"{"


def is_signed(headers: Mapping[str, str]) -> bool:
    """Whether the request has an AWS signature, which covers its body."""
    return headers.get("authorization", "").startswith(_SIGNATURES)


def _unknown(form: Form, headers: Mapping[str, str], content: bytes) -> ModelRequest:
    """Return a request of unknown cost; it is named by its path, for which there is no price."""
    form = replace(UNKNOWN, path=form.path)
    return ModelRequest(form, {}, form.path, False, 0, None, 1, 1, _attempt(headers), content, is_fixed=True)


def _may_cost(form: Form, fields: Mapping[str, str] | None) -> bool:
    """Whether a request to an unknown path may cost something: a file does only if it is the input of a batch."""
    is_upload = form.path.endswith("/files")
    return not is_upload or fields is None or fields.get("purpose") == "batch"


def _of_vendor(form: Form, body: Mapping[str, Any]) -> Form:
    """Return the form of an invocation, recognised by the vendor's own fields in its body."""
    if form.api != "invoke" or any(_at(body, cap) is not None for cap in form.caps):
        return form
    if "anthropic_version" in body:
        return replace(form, caps=("max_tokens",))
    return replace(form, output="none" if "embed" in form.model else "unknown")


def _json_object(content: bytes) -> Mapping[str, Any] | None:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _streams(form: Form, body: Mapping[str, Any]) -> bool:
    if form.streams is not None:
        return form.streams
    # Ollama streams by default. A field of a form is text.
    return body.get("stream") is not False if form.api == "ollama" else body.get("stream") in (True, "true")


def _number(form: Form, body: Mapping[str, Any]) -> object:
    """Return the field with the number of answers."""
    if form.api != "gemini":
        return body.get("n")
    configs = [config for name in _GEMINI_CONFIGS if isinstance(config := body.get(name), dict)]
    numbers = [config.get(name) for config in configs for name in ("candidateCount", "candidate_count")]
    return max(map(_answers, numbers), default=1)


def _prompts(body: Mapping[str, Any]) -> int:
    """Return the number of prompts: a list of texts or of lists of tokens; a list of tokens is one prompt."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list):
        return 1
    return max(1, sum(isinstance(item, str | list) for item in prompt))


def _inputs(body: Mapping[str, Any]) -> int:
    lists = [given for name in ("input", "requests", "texts") if isinstance(given := body.get(name), list)]
    return max(1, *map(len, lists)) if lists else 1


def _thoughts(body: Mapping[str, Any]) -> int:
    """Return the output that the request reserves for reasoning."""
    for name in (
        "thinking.budget_tokens",
        "generationConfig.thinkingConfig.thinkingBudget",
        "generation_config.thinking_config.thinking_budget",
        "additionalModelRequestFields.thinking.budget_tokens",
    ):
        if _is_count(thoughts := _at(body, name)):
            return thoughts
    return 0


def _most_input_tokens(form: Form, body: Mapping[str, Any], size: int, model: str) -> int:
    if form.api == "speech":
        return len(_text(body.get("input"))) + len(_text(body.get("instructions")))
    images = list(_images(body))
    text = size - sum(len(json.dumps(image)) for image in images)
    tools = TOOL_TOKENS if body.get("tools") or body.get("toolConfig") else 0
    return max(0, text) // BYTES_PER_TOKEN + 1 + sum(image_tokens(model, image) for image in images) + tools


def image_tokens(model: str, image: object) -> int:
    """Return an upper bound of the tokens that the model counts for an image, whatever its size."""
    of_model = max((tokens for part, tokens in _IMAGE_TOKENS_OF if part in model), default=IMAGE_TOKENS)
    return max(of_model, ORIGINAL_IMAGE_TOKENS) if _is_original(image) else of_model


def _is_original(image: object) -> bool:
    """Whether an image is sent at its original size, an option of OpenAI's models."""
    if not isinstance(image, dict):
        return False
    nested = image.get("image_url")
    return "original" in (image.get("detail"), nested.get("detail") if isinstance(nested, dict) else None)


def _images(root: object) -> Iterator[object]:
    # A stack, not recursion: a conversation may be nested as deep as JSON allows.
    todo = [root]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if part.get("type") in _IMAGES or _is_inline_image(part):
                yield part
            else:
                todo += part.values()
                # Ollama has a list of images in base64 beside the text.
                yield from (image for image in _list(part.get("images")) if isinstance(image, str))
        elif isinstance(part, list):
            todo += part


def _is_inline_image(part: Mapping[str, Any]) -> bool:
    """Whether an object is an image in the format of Gemini or Bedrock."""
    inline = part.get("inlineData") or part.get("inline_data")
    if isinstance(inline, dict):
        return _text(inline.get("mimeType") or inline.get("mime_type")).startswith("image/")
    return isinstance(image := part.get("image"), dict) and "source" in image


def _answers(wanted: object) -> int:
    """Return the number of billed answers; "5" and 5.0 count as five, since a server may accept them."""
    if isinstance(wanted, str | float):
        try:
            wanted = int(float(wanted))
        except (ValueError, OverflowError):  # not a number, or infinite: no server accepts it
            return 1
    return max(1, wanted) if _is_count(wanted) else 1


def _attempt(headers: Mapping[str, str]) -> int:
    count = headers.get(_RETRY_COUNT, "0")
    if count == "0" and (found := _AWS_ATTEMPT.match(headers.get("amz-sdk-request", ""))):
        return int(found[1])
    return int(count) + 1 if count.isascii() and count.isdigit() and len(count) < 4 else 1


def _at(body: Mapping[str, Any], name: str) -> Any:
    """Return a field, nested with dots; None if it is missing."""
    found: Any = body
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _put(body: dict[str, Any], name: str, value: int) -> None:
    """Set a field, nested at most once; the holder is copied, since the client's body shares it."""
    holder, dot, field = name.rpartition(".")
    if dot:
        held = body.get(holder)
        body[holder] = {**(held if isinstance(held, dict) else {}), field: value}
    else:
        body[field] = value


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0
