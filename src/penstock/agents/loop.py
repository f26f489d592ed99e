"""What an agent does over and over, and what it remembers.

An `AgentLoop` does one iteration at a time; the executor decides whether there is another. A loop keeps nothing of its
own: everything it has to remember is in the `LoopData` of the context, so that one loop serves any number of executions
at once. Both are open for your own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from penstock.agents.messages import ContentPart, Message, Transcript
from penstock.errors import InvalidValue
from penstock.runtime.context import ExecutionContext


class LoopAction(StrEnum):
    """What a loop does next."""

    CONTINUE = "continue"
    TERMINATE = "terminate"


@dataclass(frozen=True, slots=True)
class AgentLoopResult:
    """What came of one iteration."""

    action: LoopAction
    next_prompt: str = ""
    """What the next iteration is told beside what is remembered; for CONTINUE."""
    result: Any = None
    """What the loop was for; for TERMINATE."""
    error: BaseException | None = None
    """What kept the loop from having a result; for TERMINATE."""
    finish_reason: str | None = None
    """Why the result is not whole, such as `length`; for TERMINATE."""


CONTINUE = AgentLoopResult(LoopAction.CONTINUE)


@dataclass(frozen=True, slots=True)
class Iteration:
    """What was said in one iteration."""

    messages: tuple[Message, ...]
    is_complete: bool = True
    """False if something broke it off; what had been said by then is here."""


@runtime_checkable
class LoopData(Protocol):
    """What a loop remembers."""

    @property
    def original_input(self) -> Sequence[ContentPart]:
        """What started the loop."""

    @property
    def iteration_history(self) -> Sequence[Iteration]:
        """Every iteration there was, those that were compacted included."""

    def add_iteration_history(self, iteration: Iteration) -> None:
        """One more iteration, in the full history only."""

    @property
    def iterations(self) -> Sequence[Iteration]:
        """The iterations that the next one builds on."""

    def set_iterations(self, iterations: Sequence[Iteration]) -> None:
        """From now on, these."""


@runtime_checkable
class AgentLoop(Protocol):
    """One iteration at a time."""

    def next(self, context: ExecutionContext) -> Awaitable[AgentLoopResult]:
        """Do one iteration. What it raises ends the execution, as an error in the result does."""


class Conversation:
    """The loop data where nobody brings their own. A turn costs what it adds, however long it has become."""

    __slots__ = ("_before", "_history", "_iterations", "_transcript", "original_input")

    def __init__(self, input: str | Sequence[ContentPart] = "", before: Sequence[Message] = ()) -> None:
        if isinstance(input, str):
            self.original_input: tuple[ContentPart, ...] = (input,) if input else ()
        else:
            self.original_input = tuple(input)
        self._before = tuple(before)
        """What was said before: an earlier conversation that goes on."""
        self._history: list[Iteration] = []
        self._iterations: list[Iteration] = []
        self._transcript = self._begun()

    def _begun(self) -> Transcript:
        begun = Transcript(self._before)
        if self.original_input:
            only = self.original_input[0]
            told = only if len(self.original_input) == 1 and isinstance(only, str) else self.original_input
            begun.append(Message("user", told))
        return begun

    @property
    def iteration_history(self) -> Sequence[Iteration]:
        """Every iteration there was, those that were compacted included."""
        return self._history

    @property
    def iterations(self) -> Sequence[Iteration]:
        """The iterations that the next one builds on."""
        return self._iterations

    @property
    def transcript(self) -> Transcript:
        """What a model is sent: what was said before, the input, and the iterations in use."""
        return self._transcript

    @property
    def messages(self) -> list[Message]:
        """Everything that was said, also what was compacted."""
        return [*self._begun(), *(message for iteration in self._history for message in iteration.messages)]

    def add_iteration_history(self, iteration: Iteration) -> None:
        """One more iteration, in the full history only."""
        self._history.append(iteration)

    def set_iterations(self, iterations: Sequence[Iteration]) -> None:
        """From now on, the next iteration builds on these."""
        self._iterations = list(iterations)
        self._transcript = self._begun()
        for iteration in self._iterations:
            self._transcript.extend(iteration.messages)

    def add(self, iteration: Iteration) -> None:
        """One more iteration, in the history and in use."""
        self._history.append(iteration)
        self._iterations.append(iteration)
        self._transcript.extend(iteration.messages)


def data_of(context: ExecutionContext) -> LoopData:
    """What the context's loop remembers."""
    data = context.data
    if not isinstance(data, Conversation) and not isinstance(data, LoopData):
        raise InvalidValue("data of the context", data, "LoopData, such as a Conversation")
    return data


def remember(data: LoopData, messages: Sequence[Message], is_complete: bool = True) -> None:
    """One more iteration, in the history and in use."""
    iteration = Iteration(tuple(messages), is_complete)
    if isinstance(data, Conversation):
        data.add(iteration)
    else:
        data.add_iteration_history(iteration)
        data.set_iterations([*data.iterations, iteration])


def transcript_of(data: LoopData) -> Transcript:
    """What a model is sent."""
    if isinstance(data, Conversation):
        return data.transcript
    made = Transcript([Message("user", tuple(data.original_input))] if data.original_input else ())
    for iteration in data.iterations:
        made.extend(iteration.messages)
    return made
