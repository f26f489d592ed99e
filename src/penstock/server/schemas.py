"""What goes in and out as JSON: every field bounded, none that nobody knows.

A number is a number of JSON, and no text that looks like one; only money may be either, for the sake of its cents.

A body cannot say whose a thing is, which role somebody has, or what the host allows at most: there are no such fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from penstock.chat.limits import MAX_ATTACHMENTS, MAX_CHARACTERS, MAX_USER_TOOLS
from penstock.chat.message import ChatMessage
from penstock.chat.ports import Attachment, ChatRecord
from penstock.errors import InvalidValue
from penstock.hosting.limits import MAX_COUNT, RunLimits
from penstock.hosting.records import ApprovalRecord, ApprovalState, GraphRecord, RunRecord, RunStatus
from penstock.hosting.work.halts import Whose
from penstock.ids import ID
from penstock.kernel.graph import Problem
from penstock.money import to_nanos, to_usd
from penstock.server.errors import problem_details
from penstock.server.outages import public_error, public_message

AN_ID = f"^{ID.pattern}$"
MEDIA_TYPE = r"^[a-z0-9][a-z0-9!#$&^_.+-]{0,126}/[a-z0-9][a-z0-9!#$&^_.+-]{0,126}$"
MAX_NAME = 200
MAX_REASON = 2_000
LEAST_USD = Decimal("1E-9")
MAX_MONEY_USD = 1_000_000
MAX_TIMEOUT_S = 30 * 86_400
MAX_VERSION = 2**31 - 1

Id = Annotated[str, Field(pattern=AN_ID)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=r"^[^\x00-\x1f\x7f]+$")]
Title = Annotated[str, Field(max_length=MAX_NAME, pattern=r"^[^\x00-\x1f\x7f]*$")]
Reason = Annotated[str, Field(max_length=MAX_REASON)]
Content = Annotated[str, Field(max_length=MAX_CHARACTERS)]
Moment = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Version = Annotated[int, Field(ge=1, le=MAX_VERSION, strict=True)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=MAX_TIMEOUT_S, allow_inf_nan=False, strict=True)]


def _must_be_money(given: Any, field: str = "max_cost_usd") -> None:
    """InvalidValue for what is no amount of money, and for one that would be none: a limit is not rounded away."""
    to_nanos(given, field)
    if 0 < Decimal(str(given)) < LEAST_USD:
        raise InvalidValue(field, given, f"0, or at least {LEAST_USD:f} US dollars")


def _as_money(given: Any) -> Any:
    try:
        _must_be_money(given)
    except InvalidValue as error:
        raise ValueError(f"must be {error.expected}") from None  # without what was sent
    return given


Money = Annotated[Decimal, Field(ge=0, le=MAX_MONEY_USD, allow_inf_nan=False), BeforeValidator(_as_money)]


class Body(BaseModel):
    """What a client sends: fields that nobody knows are refused."""

    model_config = ConfigDict(extra="forbid")


class Shown(BaseModel):
    """What a client is shown."""

    model_config = ConfigDict(from_attributes=True)


class Limits(Body):
    """What a run may use; what is left out is as the server says."""

    max_cost_usd: Money | None = Field(
        None, description="US dollars, as a decimal string or a number", examples=["0.50"]
    )
    max_steps: Count | None = None
    max_tokens: Count | None = None
    max_api_calls: Count | None = None
    max_retries: Count | None = None
    timeout_s: Seconds | None = None

    def to_run_limits(self) -> RunLimits:
        """The same, as the host takes them."""
        return RunLimits(**self.model_dump(exclude_none=True))


def run_limits(limits: Limits | None) -> RunLimits | None:
    """What was asked for; None if nothing was."""
    return None if limits is None else limits.to_run_limits()


MOST = RunLimits(max_cost_usd=MAX_MONEY_USD, timeout_s=MAX_TIMEOUT_S)
"""What any client may ask for at most, whatever the host allows."""


def limits_in(given: Mapping[str, Any] | None) -> RunLimits | None:
    """What was asked for where a protocol of others carries it; InvalidValue names what is none, or too much."""
    if given is None:
        return None
    limits = RunLimits.from_dict(given)
    if limits.max_cost_usd is not None:
        _must_be_money(limits.max_cost_usd)
    return limits.within(MOST)


class NewGraph(Body):
    """A graph to keep."""

    id: Id
    name: Name
    document: dict[str, Any]


class GraphVersion(Body):
    """The next version of a graph; `expected_version` says on which it builds (0: there is none yet)."""

    name: Name | None = None
    document: dict[str, Any]
    expected_version: Annotated[int, Field(ge=0, le=MAX_VERSION, strict=True)] | None = None


class GraphDocument(Body):
    """A graph to look at."""

    document: dict[str, Any]


class ProblemShown(Shown):
    """One thing that is wrong with a graph, and where."""

    code: str
    path: str
    message: str


class Validity(Shown):
    """Whether a graph can run, and what keeps it from it."""

    valid: bool
    problems: list[ProblemShown]


class GraphSummary(Shown):
    """A graph without its document."""

    id: str
    version: int
    owner: str
    name: str
    digest: str
    created_ms: int
    is_archived: bool


class GraphListed(GraphSummary):
    """A graph in a list; `valid` says whether it can run, as of a draft it cannot."""

    valid: bool

    @classmethod
    def of(cls, record: GraphRecord, problems: Sequence[Problem]) -> GraphListed:
        """The record as it is listed."""
        return cls(**GraphSummary.model_validate(record).model_dump(), valid=not problems)


class GraphShown(GraphListed):
    """One version of a graph, and what keeps it from running."""

    problems: list[ProblemShown]
    document: dict[str, Any]

    @classmethod
    def whole(cls, record: GraphRecord, problems: Sequence[Problem]) -> GraphShown:
        """The record as it is shown."""
        listed = GraphListed.of(record, problems).model_dump()
        shown = [ProblemShown.model_validate(one) for one in problem_details(problems)]
        return cls(**listed, problems=shown, document=dict(record.document))


class GraphPage(Shown):
    """Graphs by id; `next` is what to send as `before` for those behind, None if there are none."""

    graphs: list[GraphListed]
    next: str | None


class NewRun(Body):
    """A run to start. The same `run_id` again with the same content is the same run."""

    graph_id: Id
    version: Version | None = None
    input: Any = None
    limits: Limits | None = None
    run_id: Id | None = None


class Cancel(Body):
    """Why to cancel."""

    reason: Reason = "cancelled"


class Grant(Body):
    """By how much the ceilings rise."""

    limits: Limits


class Fork(Body):
    """Where to begin again; `input`, if it is there, replaces what came into that node."""

    at: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    input: Any = None
    run_id: Id | None = None


class RunSummary(Shown):
    """A run without what went in and came out."""

    id: str
    owner: str
    graph_id: str
    graph_version: int
    limits: dict[str, Any]
    origin: dict[str, Any]
    status: RunStatus
    created_ms: int
    started_ms: int | None
    ended_ms: int | None
    epoch: int
    stop_reason: str | None
    error: str | None
    cost_usd: float
    cost_nanos: int
    unresolved_usd: float
    unknown_costs: int
    tokens_in: int
    tokens_out: int

    @classmethod
    def of(cls, run: RunRecord) -> RunSummary:
        """The record as it is listed: what is kept about its request is long, and shown with the run alone."""
        return cls(**{**_run_fields(run), "origin": {key: one for key, one in run.origin.items() if key != "about"}})


class Halt(Shown):
    """The limit that has halted a run: `whose` it is, in which budget, how high, and at which node it was met."""

    whose: Whose
    budget: str
    unit: str | None = None
    limit: float | None = None
    used: float | None = None
    node_id: str | None = None


class RunShown(RunSummary):
    """A run as it stands; `last_seq` is the newest event this is true for.

    `halted_by` is null unless the run is halted by a limit, and it is known whose.
    """

    input: Any
    output: Any
    last_seq: int
    halted_by: Halt | None

    @classmethod
    def whole(cls, run: RunRecord, last_seq: int, halt: Mapping[str, Any] | None) -> RunShown:
        """The record as it is shown."""
        halted_by = None if halt is None else Halt.model_validate(halt)
        return cls(**_run_fields(run), input=run.input, output=run.output, last_seq=last_seq, halted_by=halted_by)


def _run_fields(run: RunRecord) -> dict[str, Any]:
    same = {name: getattr(run, name) for name in RunSummary.model_fields if hasattr(run, name)}
    return {
        **same,
        "limits": dict(run.limits),
        "origin": dict(run.origin),
        "error": public_error(run.stop_reason, run.error),
        "cost_usd": to_usd(run.cost_nanos),
        "unresolved_usd": to_usd(run.unresolved_nanos),
    }


class RunPage(Shown):
    """Runs, the newest first; `next` is what to send as `before` for older ones, None if there are none."""

    runs: list[RunSummary]
    next: str | None


class EventShown(Shown):
    """One thing that happened to a run."""

    seq: int
    at_ms: int
    type: str
    data: dict[str, Any]


class EventPage(Shown):
    """Events in order; `status` is how the run stood afterwards."""

    events: list[EventShown]
    last_seq: int
    status: RunStatus


class CancelShown(Shown):
    """What became of a cancel."""

    result: Literal["cancelled", "already_cancelled", "remembered", "ended"]


class Verdict(Body):
    """Why it was decided so."""

    reason: Reason = ""


class Edit(Verdict):
    """What goes on instead of what was asked about."""

    answer: Any


class ApprovalShown(Shown):
    """A question that a run put, and what became of it."""

    id: str
    run_id: str
    owner: str
    node_id: str
    question: str
    value: Any
    state: ApprovalState
    answer: Any
    reason: str
    asked_ms: int
    answered_ms: int | None
    answered_by: str | None

    @classmethod
    def of(cls, record: ApprovalRecord) -> ApprovalShown:
        """The record as it is shown."""
        return cls.model_validate(record)


class ApprovalPage(Shown):
    """Questions, the oldest first; `next` is what to send as `before` for those behind, None if there are none."""

    approvals: list[ApprovalShown]
    next: str | None


class NewChat(Body):
    """A chat with a graph."""

    graph_id: Id
    title: Title = ""
    chat_id: Id | None = None


class ChatTitle(Body):
    """Another title."""

    title: Title


class Say(Body):
    """Something to say, and what the answer may use."""

    content: Content
    parent_id: Id | None = None
    attachments: Annotated[list[Id], Field(max_length=MAX_ATTACHMENTS)] = []
    user_tools: Annotated[list[Name], Field(max_length=MAX_USER_TOOLS)] = []
    limits: Limits | None = None
    run_id: Id | None = None


class Again(Body):
    """Another answer, and what it may use."""

    user_tools: Annotated[list[Name], Field(max_length=MAX_USER_TOOLS)] = []
    limits: Limits | None = None
    run_id: Id | None = None


class Rephrase(Again):
    """The same message in other words."""

    content: Content


class ChatShown(Shown):
    """A chat without what was said."""

    id: str
    owner: str
    title: str
    graph_id: str
    created_ms: int
    updated_ms: int

    @classmethod
    def of(cls, record: ChatRecord) -> ChatShown:
        """The record as it is shown."""
        return cls.model_validate(record)


class ChatPage(Shown):
    """Chats, the one used last first; `next` is what to send as `before` for the others."""

    chats: list[ChatShown]
    next: str | None


class MessageShown(Shown):
    """One message of a chat."""

    id: str
    parent_id: str | None
    role: str
    content: str
    at_ms: int
    data: dict[str, Any]

    @classmethod
    def of(cls, message: ChatMessage) -> MessageShown:
        """The message as it is shown."""
        same = {name: getattr(message, name) for name in cls.model_fields}
        return cls(**{**same, "data": public_message(message.data)})


class Conversation(ChatShown):
    """A chat with everything that was said, and the ids of the messages in view, from the first to the last."""

    messages: list[MessageShown]
    active: list[str]


class TurnShown(Shown):
    """Where an answer is being written: its run, whose events tell it."""

    chat_id: str
    run_id: str
    user_message_id: str | None
    message_id: str


class AttachmentShown(Shown):
    """What a message can refer to."""

    id: str
    name: str
    media_type: str
    size: int
    created_ms: int

    @classmethod
    def of(cls, record: Attachment) -> AttachmentShown:
        """The record as it is shown."""
        return cls.model_validate(record)


class HandleShown(Shown):
    """Where edges arrive or leave."""

    name: str
    type: str
    channel: str
    many: str
    required: bool


class NodeTypeShown(Shown):
    """A node type: its handles (None: open), and the JSON Schema of its data."""

    type: str
    inputs: list[HandleShown] | None
    outputs: list[HandleShown] | None
    data_schema: dict[str, Any] | None


class NodeTypes(Shown):
    """Every node type that graphs here may use."""

    node_types: list[NodeTypeShown]


class Me(Shown):
    """Who asks."""

    name: str
    role: str
    until: Moment | None = Field(description="until when their token is good; null if always")


class Health(Shown):
    """That the process answers."""

    status: Literal["ok"]


class Readiness(Shown):
    """Whether the stores answer."""

    status: Literal["ready"]


class ErrorFacts(Shown):
    """What went wrong: a code for programs, a sentence for people, and where in the body."""

    code: str
    message: str
    path: str | None = None
    details: list[dict[str, Any]] | None = None


class ErrorShown(Shown):
    """Every answer that is no success."""

    error: ErrorFacts
