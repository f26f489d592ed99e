"""An answer as a `response` object, and as the events of its stream.

A statement is one message item; each tool that the answering agent used is a `function_call` item that is complete
already, between the statements around it. One fold makes all of them: what a stream told, the response that it ends
with, and the one that is asked for later are the same. A stream cannot take anything back: an item that is withdrawn is
done there, as incomplete, and the response does not have it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from penstock.server.openai.wire.answer import Ended, Piece, Said, Used, Waits, Withdrawn
from penstock.server.openai.wire.chunks import asked_in, facts

Json = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

STATUSES: Mapping[str, Status] = {
    "queued": "queued",
    "running": "in_progress",
    "waiting": "in_progress",
    "parked": "in_progress",
    "completed": "completed",
    "halted": "incomplete",
    "failed": "failed",
    "cancelled": "cancelled",
}
"""What OpenAI calls the states of a run."""
EMPTY: tuple[Any, ...] = ({}, [], ())
MAX_KEPT = 20_000
"""So many characters of what a request said, as JSON, are kept to be repeated."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the request said that the response repeats."""

    model: str
    instructions: str | None = None
    previous_response_id: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    background: bool = False
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    user: str | None = None
    ignored: Sequence[str] = ()

    @classmethod
    def of(cls, kept: object, model: str) -> Asked:
        """What was kept of it; of a run that was asked for in another way, that it is of this model."""
        given = kept if isinstance(kept, Mapping) else {}
        return cls(**{"model": model, **{one.name: given[one.name] for one in fields(cls) if one.name in given}})

    def kept(self) -> Json:
        """What is kept with the run, to be repeated whenever the response is asked for: all of it, unless it is long.

        Lists of runs are read with what is kept of them, so the parts that may be of any length go first.
        """
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        facts = {name: value for name, value in given.items() if value is not None and value not in EMPTY}
        for name in ("instructions", "ignored", "user"):
            if len(json.dumps(facts, ensure_ascii=False)) > MAX_KEPT:
                facts.pop(name, None)
        return facts


def response_id(run_id: str) -> str:
    """The run's id, as OpenAI's ids look."""
    return f"resp_{run_id}"


def run_id_of(response_id: str) -> str | None:
    """The run behind a response; None if it cannot be one."""
    prefix, _, run_id = response_id.partition("_")
    return run_id if prefix == "resp" and run_id else None


@dataclass(slots=True)
class ResponseUnderWay:
    """One response: what of it is known so far, and the number of the next event."""

    run_id: str
    created_at: int
    asked: Asked
    status: Status = "in_progress"
    output: list[Json] = field(default_factory=list)
    """All items that were told, at the index that the stream gave them."""
    ended: Ended | None = None
    waits: Waits | None = None
    """What the run asks people, while it does."""
    _sequence: int = 0
    _is_open: bool = False
    """Whether the last item is a message that is being written."""
    _standing: list[int] = field(default_factory=list)
    """Which items are the response's: those that were not withdrawn."""
    _pieces: list[str] = field(default_factory=list)
    """What has been said of it: put together once, when it is done."""

    @property
    def told(self) -> int:
        """How many events there were."""
        return self._sequence

    def opening(self) -> Iterator[Json]:
        """The first two events; the same whenever it is looked at, so that a stream can be taken up again."""
        yield self._event("response.created", response=self.to_dict())
        yield self._event("response.in_progress", response=self.to_dict())

    def broken(self, code: str, message: str) -> Json:
        """The stream cannot go on, whatever becomes of the run.

        It has the number of the event before it: whoever takes the stream up again after that one misses nothing.
        """
        about = {"run_id": self.run_id}
        error: Json = {"type": "error", "sequence_number": self._sequence - 1, "code": code, "message": message}
        return {**error, "param": None, "penstock": about}

    def events(self, piece: Piece) -> Iterator[Json]:
        """The piece as events."""
        if isinstance(piece, Said):
            yield from self._said(piece)
        elif isinstance(piece, Used):
            yield from self._close("completed")
            yield from self._used(piece)
        elif isinstance(piece, Withdrawn):
            yield from self._close("incomplete")
            del self._standing[len(self._standing) - piece.items :]
        elif isinstance(piece, Waits):
            self.waits = piece
            yield self._event("response.in_progress", response=self.to_dict())
        else:
            yield from self._finish(piece)

    def to_dict(self) -> Json:
        """The response as it stands."""
        asked = self.asked
        return {
            "id": response_id(self.run_id),
            "object": "response",
            "created_at": self.created_at,
            "completed_at": self.ended.at_ms // 1000 if self.ended and self.status == "completed" else None,
            "status": self.status,
            "background": asked.background,
            "error": self._error(),
            "incomplete_details": self._why_incomplete(),
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": dict(asked.metadata),
            "model": asked.model,
            "output": self._items(),
            "parallel_tool_calls": True,
            "previous_response_id": asked.previous_response_id,
            "store": True,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": self._usage(),
            "user": asked.user,
            "penstock": self._facts(),
        }

    def _facts(self) -> Json:
        known = facts(self.run_id, self.asked.ignored, self.ended)
        if self.waits is not None and self.ended is None:
            known["approvals"] = asked_in(self.waits)
        return known

    def _items(self) -> list[Json]:
        items = [dict(self.output[index]) for index in self._standing]
        if self._is_open:
            items[-1]["content"] = [_part("".join(self._pieces))]
        return items

    def _said(self, piece: Said) -> Iterator[Json]:
        if piece.begins or not self._is_open:
            yield from self._close("completed")
            yield from self._open()
        self._pieces.append(piece.text)
        yield self._in_part("response.output_text.delta", delta=piece.text, logprobs=[])

    def _open(self) -> Iterator[Json]:
        item: Json = {"type": "message", "id": self._item_id("msg"), "status": "in_progress", "role": "assistant"}
        self._begin({**item, "content": []})
        self._is_open = True
        yield self._of_item("response.output_item.added")
        yield self._in_part("response.content_part.added", part=_part(""))

    def _begin(self, item: Json) -> None:
        self._standing.append(len(self.output))
        self.output.append(item)

    def _close(self, status: str, text: str = "") -> Iterator[Json]:
        """The item that is being written is done, with this text; with what was said, if none is given."""
        if not self._is_open:
            return
        text = text or "".join(self._pieces)
        self._pieces.clear()
        self._is_open = False
        yield self._in_part("response.output_text.done", text=text, logprobs=[])
        yield self._in_part("response.content_part.done", part=_part(text))
        self.output[-1] = {**self.output[-1], "status": status, "content": [_part(text)]}
        yield self._of_item("response.output_item.done")

    def _used(self, used: Used) -> Iterator[Json]:
        item: Json = {"type": "function_call", "id": self._item_id("fc"), "call_id": used.id, "name": used.name}
        self._begin({**item, "arguments": "", "status": "in_progress"})
        yield self._of_item("response.output_item.added")
        yield self._on_item("response.function_call_arguments.delta", delta=used.arguments)
        yield self._on_item("response.function_call_arguments.done", name=used.name, arguments=used.arguments)
        self.output[-1] = {**item, "arguments": used.arguments, "status": "completed"}
        yield self._of_item("response.output_item.done")

    def _finish(self, ended: Ended) -> Iterator[Json]:
        self.ended = ended
        if ended.status == "parked":  # and is told on from here, to whoever asks for the rest
            yield self.broken("parked", PARKED)
            return
        # What it came to counts: an attempt inside of the run that was given up may have said more.
        self.status = _final(ended)
        yield from self._close("completed" if self.status == "completed" else "incomplete", ended.text)
        told = "failed" if self.status == "cancelled" else self.status  # a stream knows no other end for it
        yield self._event(f"response.{told}", response=self.to_dict())

    def _error(self) -> Json | None:
        ended = self.ended
        if ended is None or self.status != "failed":
            return None
        why = ": ".join(part for part in (ended.reason, ended.message) if part)
        return {"code": "server_error", "message": why or ended.status}

    def _why_incomplete(self) -> Json | None:
        """One of the two reasons that OpenAI knows; which limit of a run it was, `penstock.stop_reason` says."""
        if self.status != "incomplete":
            return None
        is_filtered = self.ended is not None and self.ended.cut == "content_filter"
        return {"reason": "content_filter" if is_filtered else "max_output_tokens"}

    def _usage(self) -> Json | None:
        if self.ended is None or self.ended.status == "parked":
            return None
        return {
            "input_tokens": self.ended.tokens_in,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self.ended.tokens_out,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.ended.tokens_in + self.ended.tokens_out,
            **self.ended.cost,
        }

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self.run_id}_{len(self.output)}"

    def _event(self, kind: str, **fields: Any) -> Json:
        number = self._sequence
        self._sequence += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _of_item(self, kind: str) -> Json:
        return self._event(kind, output_index=len(self.output) - 1, item=dict(self.output[-1]))

    def _on_item(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, output_index=len(self.output) - 1, item_id=self.output[-1]["id"], **fields)

    def _in_part(self, kind: str, **fields: Any) -> Json:
        return self._on_item(kind, content_index=0, **fields)


PARKED = "the run was set aside before it ended and goes on later; GET the response to see what became of it"


def _final(ended: Ended) -> Status:
    """A run that something other than a limit halted has failed, as OpenAI counts; an answer that was cut is part."""
    if ended.cut is not None and ended.status == "completed":
        return "incomplete"
    if ended.status == "halted" and not ended.is_limit:
        return "failed"
    return STATUSES[ended.status]


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
