"""Request and response bodies: every field is bounded, and unknown fields of a request are rejected.

A number must be a JSON number, not a numeric string; only money may be either, so that amounts can be exact.

A body cannot set the owner of a thing, a user's role or the host's ceilings: there are no such fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    field_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from penstock.chat.conversation import MAX_ATTACHMENTS, MAX_CHARACTERS, MAX_USER_TOOLS, ChatMessage
from penstock.chat.ports import Attachment, ChatPreview, ChatRecord, PathWindow
from penstock.containment.accounts import Balance
from penstock.errors import InvalidValue
from penstock.hosting.bills import HostedBill
from penstock.hosting.budgets import Level
from penstock.hosting.durability import RUNS
from penstock.hosting.halts import Step, Whose, advice
from penstock.hosting.limits import MAX_COUNT, RunLimits
from penstock.hosting.payloads import is_truncated
from penstock.hosting.ports import ApprovalRecord, ApprovalState, GraphRecord, PayloadRecord, RunRecord, RunStatus
from penstock.ids import ID
from penstock.kernel.graph import Problem
from penstock.money import known_usd, to_nanos, to_usd
from penstock.nodes.program import is_program
from penstock.runtime.graphs.document_schema import DOCUMENT
from penstock.server.errors import problem_details
from penstock.server.graph_check import is_conversational
from penstock.server.unavailable import public_error, public_message
from penstock.stops import StopReason
from penstock.tracing.payloads import RecordPayloads

AN_ID = f"^{ID.pattern}$"
MEDIA_TYPE = r"^[a-z0-9][a-z0-9!#$&^_.+-]{0,126}/[a-z0-9][a-z0-9!#$&^_.+-]{0,126}$"
MAX_NAME = 200
MAX_REASON = 2_000
LEAST_USD = Decimal("1E-9")
MAX_MONEY_USD = 1_000_000
MAX_TIMEOUT_S = 30 * 86_400
MAX_VERSION = 2**31 - 1
MAX_NODE_PATH = 8_000
MAX_POSITIONS = 10_000
"""Maximum number of positions in one request."""

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
    """Raise InvalidValue if `given` is not an amount of money, or would be rounded to 0: that would drop the limit."""
    to_nanos(given, field)
    if 0 < Decimal(str(given)) < LEAST_USD:
        raise InvalidValue(field, given, f"0, or at least {LEAST_USD:f} US dollars")


def _as_money(given: Any, field: str = "max_cost_usd") -> Any:
    try:
        _must_be_money(given, field)
    except InvalidValue as error:
        raise ValueError(f"must be {error.expected}") from None  # without the value that was sent
    return given


Money = Annotated[Decimal, Field(ge=0, le=MAX_MONEY_USD, allow_inf_nan=False), BeforeValidator(_as_money)]


class _Described:
    """Describes a graph document in the API's schema.

    Validation stays with `parse_graph`, which lists every problem with its path.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(source)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(DOCUMENT.core_schema)


Document = Annotated[dict[str, Any], _Described()]
"""A graph document, as an editor writes it."""


class Body(BaseModel):
    """A request body; unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")


class Shown(BaseModel):
    """A response body."""

    model_config = ConfigDict(from_attributes=True)


class Limits(Body):
    """Limits of a run; the server's defaults apply to omitted fields."""

    max_cost_usd: Money | None = Field(
        None, description="US dollars, as a decimal string or a number", examples=["0.50"]
    )
    max_steps: Count | None = None
    max_tokens: Count | None = None
    max_api_calls: Count | None = None
    max_retries: Count | None = None
    timeout_s: Seconds | None = None

    def to_run_limits(self) -> RunLimits:
        """Convert to the host's type."""
        return RunLimits(**self.model_dump(exclude_none=True))


def run_limits(limits: Limits | None) -> RunLimits | None:
    """Return the requested limits as the host's type; None if none were requested."""
    return None if limits is None else limits.to_run_limits()


MOST = RunLimits(max_cost_usd=MAX_MONEY_USD, timeout_s=MAX_TIMEOUT_S)
"""Highest limits that a client may request, regardless of the host's ceilings."""


def parse_limits(given: Mapping[str, Any]) -> RunLimits:
    """Parse limits from a foreign protocol (OpenAI, MCP); raises InvalidValue for an invalid or too high value."""
    limits = RunLimits.from_dict(given)
    if limits.max_cost_usd is not None:
        _must_be_money(limits.max_cost_usd)
    return limits.within(MOST)


SourceText = Annotated[
    str | None,
    Field(description="The document as JSON text, kept byte for byte: `GET …/source` returns it"),
]


class NewGraph(Body):
    """A new graph to save."""

    id: Id
    name: Name
    document: Document
    note: Reason = Field("", description="Why it is saved, for the list of versions")
    source: SourceText = None


class GraphVersion(Body):
    """The next version of a graph; `expected_version` is the version it is based on (0: the graph is new)."""

    name: Name | None = None
    document: Document
    note: Reason = Field("", description="Why it is saved, for the list of versions")
    source: SourceText = None
    expected_version: Annotated[int, Field(ge=0, le=MAX_VERSION, strict=True)] | None = None


class GraphDocument(Body):
    """A graph document to validate."""

    document: Document


class ProblemShown(Shown):
    """One problem of a graph, and its path in the document."""

    code: str
    path: str
    message: str


class HandleShown(Shown):
    """A handle: where edges of a node arrive or leave."""

    name: str
    type: str
    channel: Literal["flow", "link"]
    many: Literal["one", "list", "first"]
    required: bool


class ResolvedHandleShown(HandleShown):
    """A handle of one node."""

    declared: bool = Field(description="False if only an edge names it, and the node's type does not have it")


class NodeHandlesShown(Shown):
    """The handles of one node: those of its type, those its settings add, and those that only edges name."""

    inputs: list[ResolvedHandleShown]
    outputs: list[ResolvedHandleShown]


class Validity(Shown):
    """Whether a graph can run, and the problems that prevent it."""

    valid: bool
    problems: list[ProblemShown]
    handles: dict[str, NodeHandlesShown] | None = Field(
        None, description="The handles of each node by its path, such as each/read; null with handles=false"
    )


class GraphSummary(Shown):
    """A graph without its document."""

    id: str
    version: int
    owner: str
    name: str
    digest: str
    created_ms: int
    is_archived: bool
    saved_by: str = Field("", description="Who saved this version; empty for versions of older servers")
    note: str = ""


class GraphListed(GraphSummary):
    """A graph in a list: whether it can run, which a draft cannot, whether it can answer in a chat, and its source.

    The source is `program` for a graph or agent in Python that the server was started with: it follows its code, and
    cannot be changed over the API. Any other graph is a `document`.
    """

    valid: bool
    chat: bool = Field(description="Whether it can answer in a chat, which it enters at its chat start or its inputs")
    made_for_chat: bool = Field(description="Whether it has a chat start, and so receives the whole conversation")
    source: Literal["document", "program"]

    @classmethod
    def of(cls, record: GraphRecord, problems: Sequence[Problem], *, can_chat: bool) -> GraphListed:
        """Convert a record to its list entry."""
        return cls(
            **GraphSummary.model_validate(record).model_dump(),
            valid=not problems,
            chat=can_chat,
            made_for_chat=is_conversational(record),
            source="program" if is_program(record.document) else "document",
        )


class GraphShown(GraphListed):
    """One version of a graph, with the problems that prevent it from running."""

    problems: list[ProblemShown]
    document: Document

    @classmethod
    def whole(cls, record: GraphRecord, problems: Sequence[Problem], *, can_chat: bool) -> GraphShown:
        """Convert a record, with its document and problems."""
        listed = GraphListed.of(record, problems, can_chat=can_chat).model_dump()
        shown = [ProblemShown.model_validate(problem) for problem in problem_details(problems)]
        return cls(**listed, problems=shown, document=dict(record.document))


class GraphPage(Shown):
    """A page of graphs by id; send `next` as `before` for the next page; null on the last page."""

    graphs: list[GraphListed]
    next: str | None


MAX_POSITION = 1_000_000
Coordinate = Annotated[float, Field(ge=-MAX_POSITION, le=MAX_POSITION, allow_inf_nan=False, strict=True)]
NodePath = Annotated[str, Field(min_length=1, max_length=MAX_NODE_PATH)]


class NodePosition(Body):
    """Where an editor draws a node."""

    x: Coordinate
    y: Coordinate


class LayoutChange(Body):
    """Positions to store by node, null to remove one; a node of a nested graph is a path, as in `each/read`."""

    positions: Annotated[dict[NodePath, NodePosition | None], Field(max_length=MAX_POSITIONS)]


class LayoutShown(Shown):
    """The stored positions of a graph's nodes. They belong to the graph: moving a node makes no version."""

    positions: dict[str, NodePosition]


class ChangeShown(Shown):
    """One difference between two versions of a graph.

    `path` is relative to the node or edge, or to the document if it is about neither.
    """

    kind: Literal["added", "removed", "changed"]
    what: Literal["node", "edge", "graph"]
    id: str
    path: str
    before: Any = None
    after: Any = None


class GraphDiff(Shown):
    """The changes from one version of a graph to another, by node and edge; `truncated` if there are more."""

    graph_id: str
    before: GraphSummary
    after: GraphSummary
    changes: list[ChangeShown]
    truncated: bool


class NewRun(Body):
    """A run to start. Idempotent: the same `run_id` with the same content returns the existing run."""

    graph_id: Id
    version: Version | None = None
    input: Any = None
    limits: Limits | None = None
    run_id: Id | None = None


class Cancel(Body):
    """The reason for a cancel request."""

    reason: Reason = "cancelled"


class Grant(Body):
    """Amounts by which to raise a run's limits."""

    limits: Limits


CallId = Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=r"^[^\x00-\x1f\x7f]+$")]
Person = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=MAX_NAME,
        pattern=r"^[^\x00-\x1f\x7f]+$",
        description="Who resolves the bill, on a server without tokens; with tokens it is the owner of the token",
    ),
]
ResolvedMoney = Annotated[
    Decimal, Field(ge=0, le=MAX_MONEY_USD, allow_inf_nan=False), BeforeValidator(partial(_as_money, field="cost_usd"))
]


class BillOfKey(Body):
    """An unresolved bill of a gateway key whose call cost nothing."""

    call_id: CallId


class ReleaseBill(BillOfKey):
    """An unresolved bill whose call cost nothing."""

    by: Person = None


class BillCost(Body):
    """The real cost of a call."""

    cost_usd: ResolvedMoney = Field(description="US dollars, as a decimal string or a number", examples=["0.02"])
    tokens_in: Count = 0
    tokens_out: Count = 0


class CostOfKey(BillCost, BillOfKey):
    """The real cost of the call of an unresolved bill of a gateway key."""


class ResolveBill(BillCost, ReleaseBill):
    """The real cost of the call of an unresolved bill."""


class BillShown(Shown):
    """A call whose bill is unknown, and the amount held for it; fields that no event of the run has are null."""

    call_id: str
    name: str | None
    model: str | None
    held_usd: float
    held_tokens: int
    at_ms: int | None
    reason: str

    @classmethod
    def of(cls, bill: HostedBill) -> BillShown:
        """Convert a bill."""
        about = {name: getattr(bill, name) for name in ("call_id", "name", "model", "at_ms", "reason")}
        tokens = bill.held.tokens_in + bill.held.tokens_out
        return cls(**about, held_usd=to_usd(bill.held.cost_nanos), held_tokens=tokens)


class BillList(Shown):
    """The unresolved bills of a run, oldest first, and the total amount held for them."""

    bills: list[BillShown]
    unresolved_usd: float


class Fork(Body):
    """The node to fork at; `input`, if present, replaces that node's input."""

    at: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    input: Any = None
    run_id: Id | None = None


class LiveUsage(Shown):
    """The usage of a run in progress so far, and the amounts held for its calls."""

    spent_usd: float
    held_usd: float
    unresolved_usd: float
    tokens: int
    api_calls: int
    steps: int | None = Field(description="Null where the run is executed by another server")

    @classmethod
    def of(cls, balance: Balance) -> LiveUsage:
        """Convert the figures of a run's account."""
        return cls(
            spent_usd=balance.spent_usd,
            held_usd=balance.held_usd,
            unresolved_usd=balance.unresolved_usd,
            tokens=balance.tokens_in + balance.tokens_out,
            api_calls=balance.api_calls,
            steps=None if balance.name.startswith(RUNS) else balance.steps,
        )


class RunSummary(Shown):
    """A run without its input and output."""

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
    cost_usd: float | None = Field(
        description="Known cost: a lower bound if there are `unknown_costs`; null if nothing of it is known"
    )
    cost_nanos: int
    unresolved_usd: float
    unknown_costs: int = Field(description="Number of calls that were billed at an unknown cost")
    tokens_in: int
    tokens_out: int
    live: LiveUsage | None = Field(
        default=None, description="Figures so far of a run in progress, whose other figures are recorded at its end"
    )

    @classmethod
    def of(cls, run: RunRecord, live: Balance | None = None) -> RunSummary:
        """Convert a record to its list entry, without `origin.about`, which is long and only part of a single run."""
        origin = {key: one for key, one in run.origin.items() if key != "about"}
        return cls(**{**_run_fields(run), "origin": origin, "live": None if live is None else LiveUsage.of(live)})


class Halt(Shown):
    """The limit that halted a run: its owner (`whose`), its budget, its height, and the node that reached it."""

    whose: Whose
    budget: str
    unit: str | None = None
    limit: float | None = None
    used: float | None = None
    node_id: str | None = None


class AdviceShown(Shown):
    """A step that lets a halted run go on; `amount_usd` is its amount, if it has one."""

    step: Step
    message: str
    amount_usd: float | None


class RunShown(RunSummary):
    """The current state of a run, as of the event `last_seq`.

    `halted_by` is null unless the run was halted by a limit whose owner is known. `advice` has the steps that let a
    halted run go on, the one that helps most first.
    """

    input: Any
    output: Any
    last_seq: int
    halted_by: Halt | None
    advice: list[AdviceShown]

    @classmethod
    def whole(cls, run: RunRecord, last_seq: int, live: Balance | None = None) -> RunShown:
        """Convert a record, with its input, output and halt."""
        halted_by = None if run.halt is None else Halt.model_validate(run.halt)
        return cls(
            **_run_fields(run),
            live=None if live is None else LiveUsage.of(live),
            input=run.input,
            output=run.output,
            last_seq=last_seq,
            halted_by=halted_by,
            advice=[AdviceShown.model_validate(step) for step in advice(run)],
        )


def _run_fields(run: RunRecord) -> dict[str, Any]:
    same = {name: getattr(run, name) for name in RunSummary.model_fields if hasattr(run, name)}
    return {
        **same,
        "limits": dict(run.limits),
        "origin": dict(run.origin),
        "error": public_error(run.stop_reason, run.error),
        "cost_usd": known_usd(run.cost_nanos, run.unknown_costs),
        "unresolved_usd": to_usd(run.unresolved_nanos),
    }


class UnitShown(Shown):
    """Figures of a budget in one unit; `limit` and `left` are null if it is unlimited."""

    unit: Literal["usd", "steps", "tokens", "api calls", "retries"]
    spent: float
    held: float
    unresolved: float
    waiting: float = Field(description="What waiting calls of this run need")
    limit: float | None
    left: float | None


class BudgetShown(Shown):
    """A budget: the run's own, that of a node in it, or the daily budget of its owner or of all owners."""

    budget: str
    level: Level
    node_id: str | None = Field(description="Path of the node the budget belongs to, such as `each/3/read`")
    units: list[UnitShown]


class BudgetList(Shown):
    """The budgets of a run, as of the event `last_seq`."""

    budgets: list[BudgetShown]
    last_seq: int


class StopShown(Shown):
    """Why a call was stopped: whose budget refused, the amount requested and the amount held; null where unknown."""

    reason: StopReason
    message: str
    budget: str | None
    whose: Whose | None
    unit: str | None
    limit: float | None
    used: float | None
    held: float | None
    asked: float | None
    unresolved: float | None
    momentary: bool
    cause: bool = Field(default=True, description="Whether the stop arose at this call, and not at one below it")


class TreeColumns(Shown):
    """One list per fact, with one value per call; -1 stands for none. Texts are indexes into `strings`."""

    call: list[int] = Field(description="Number of the call: 7 is the call `n000007`")
    parent: list[int] = Field(description="Row of the call that made it")
    kind: list[int] = Field(description="Index into `kinds`")
    name: list[int]
    node: list[int] = Field(description="Path of its node")
    node_type: list[int] = Field(description="Type of the node, if the call executes one")
    model: list[int]
    start_ms: list[int] = Field(description="Relative to `base_ms`")
    end_ms: list[int] = Field(description="Relative to `base_ms`; -1 while it runs")
    status: list[int] = Field(description="Index into `statuses`")
    cost_nanos: list[int] = Field(description="Nano-dollars, without the calls below it")
    tokens_in: list[int]
    tokens_out: list[int]
    attempt: list[int]
    stop: list[int] = Field(description="Index into `stops`")
    flags: list[int] = Field(description="Sum of 1: from the journal, 2: abandoned, 4: cost unknown, 8: waited")


class RunTree(Shown):
    """The call tree of a run in the order in which its calls began, as of the event `last_seq`."""

    run_id: str
    status: RunStatus
    epoch: int
    last_seq: int
    base_ms: int
    calls: int = Field(description="Number of calls; more than there are rows if the tree is `truncated`")
    truncated: bool
    kinds: list[str]
    statuses: list[str]
    strings: list[str]
    stops: list[StopShown]
    columns: TreeColumns


class RunExplanation(Shown):
    """A run in words, as of the event `last_seq`."""

    run_id: str
    status: RunStatus
    last_seq: int
    text: str = Field(description="One line for each call, below the call that made it, with its cost, time and end")
    left_out: int = Field(description="Number of calls that have no line")
    error: str | None = Field(description="What stopped the run, in a sentence")
    halted_by: Halt | None
    advice: list[AdviceShown] = Field(description="Steps that let a halted run go on, the one that helps most first")

    @classmethod
    def of(cls, run: RunRecord, text: str, left_out: int, last_seq: int) -> RunExplanation:
        """Explain a run whose calls are `text`."""
        shown = RunShown.whole(run, last_seq)
        return cls(
            run_id=run.id,
            status=run.status,
            last_seq=last_seq,
            text=text,
            left_out=left_out,
            error=shown.error,
            halted_by=shown.halted_by,
            advice=shown.advice,
        )


class CallPayload(Shown):
    """The request and response of a model or tool call, if the operator of the server records them."""

    call_id: str
    recording: RecordPayloads = Field(
        description="How it was recorded: `redacted` is without what looks like a secret; `off` if nothing is stored"
    )
    request: Any
    response: Any
    truncated: bool = Field(description="Whether something was left out for its size")
    expired: bool = Field(description="Whether the call is older than payloads are kept")

    @classmethod
    def of(cls, record: PayloadRecord) -> CallPayload:
        """Convert a record."""
        parts = record.request, record.response
        return cls(
            call_id=record.call_id,
            recording=record.recording,
            request=record.request,
            response=record.response,
            truncated=any(map(is_truncated, parts)),
            expired=False,
        )

    @classmethod
    def none(cls, call_id: str, *, expired: bool) -> CallPayload:
        """Return the response for a call without a stored payload."""
        return cls(call_id=call_id, recording="off", request=None, response=None, truncated=False, expired=expired)


class Difference(Shown):
    """One difference of two runs: a field, or `node` and the id of a node, and its value in each."""

    what: str
    one: Any
    other: Any


class RunDiff(Shown):
    """The differences of two runs; empty if there are none."""

    differences: list[Difference]


class RunPage(Shown):
    """A page of runs, newest first; send `next` as `before` for older runs; null on the last page."""

    runs: list[RunSummary]
    next: str | None
    total: int | None = Field(description="Number of matching runs on all pages, at most 10,000; null unless requested")


class EventShown(Shown):
    """One event of a run."""

    seq: int
    at_ms: int
    type: str
    data: dict[str, Any]


class EventPage(Shown):
    """A page of events in order; `status` is the run's status after they were read."""

    events: Annotated[
        list[EventShown],
        WithJsonSchema({"type": "array", "title": "Events", "items": {"$ref": "#/components/schemas/RunEvent"}}),
    ]
    last_seq: int
    status: RunStatus


class CancelShown(Shown):
    """The result of a cancel request."""

    result: Literal["cancelled", "already_cancelled", "remembered", "ended"]


class Verdict(Body):
    """The reason for a decision."""

    reason: Reason = ""


class Edit(Verdict):
    """The value to continue with, in place of the one submitted for approval."""

    answer: Any


class ToolShape(Shown):
    """A tool, and the JSON Schema of its arguments."""

    tool: str
    parameters: dict[str, Any]


class ApprovalShown(Shown):
    """An approval request of a run, and its outcome."""

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
    expects: ToolShape | None = Field(
        default=None, description="The tool that would run, whose arguments an edit may replace; null for any value"
    )

    @field_validator("expects", mode="before")
    @classmethod
    def _only_a_tool(cls, expects: object) -> object:
        """Keep only a tool: questions for a client's tools expect something else, and a damaged row anything."""
        given = expects if isinstance(expects, Mapping) else {}
        is_tool = isinstance(given.get("tool"), str) and isinstance(given.get("parameters"), dict)
        return given if is_tool else None

    @classmethod
    def of(cls, record: ApprovalRecord) -> ApprovalShown:
        """Convert a record."""
        return cls.model_validate(record)


class ApprovalPage(Shown):
    """A page of approvals, oldest first; send `next` as `before` for the next page; null on the last page."""

    approvals: list[ApprovalShown]
    next: str | None


class NewChat(Body):
    """A new chat with a graph."""

    graph_id: Id
    title: Title = ""
    chat_id: Id | None = None


class ChatTitle(Body):
    """The new title of a chat."""

    title: Title


class NewMessage(Body):
    """A user message, and the tools and limits of the answer."""

    content: Content
    parent_id: Id | None = None
    attachments: Annotated[list[Id], Field(max_length=MAX_ATTACHMENTS)] = []
    user_tools: Annotated[list[Name], Field(max_length=MAX_USER_TOOLS)] = []
    limits: Limits | None = None
    run_id: Id | None = None


class NewAnswer(Body):
    """The tools and limits of a further answer."""

    user_tools: Annotated[list[Name], Field(max_length=MAX_USER_TOOLS)] = []
    limits: Limits | None = None
    run_id: Id | None = None


class EditedMessage(NewAnswer):
    """The new text of a user message."""

    content: Content


class ChatShown(Shown):
    """A chat without its messages."""

    id: str
    owner: str
    title: str
    graph_id: str
    created_ms: int
    updated_ms: int

    @classmethod
    def of(cls, record: ChatRecord) -> ChatShown:
        """Convert a record."""
        return cls.model_validate(record)


class LastMessage(Shown):
    """The last message in view of a chat, with the beginning of its content."""

    message_id: str
    role: str
    content: str
    at_ms: int
    state: str | None = Field(description="Of an answer: writing, complete, partial, halted or failed")


class ChatListed(ChatShown):
    """A chat in a list."""

    last: LastMessage | None = Field(description="Null if the chat has no messages")

    @classmethod
    def with_last(cls, record: ChatRecord, preview: ChatPreview | None) -> ChatListed:
        """Convert a record and the preview of its last message."""
        last = None if preview is None else LastMessage.model_validate(preview)
        return cls(**ChatShown.of(record).model_dump(), last=last)


class ChatPage(Shown):
    """A page of chats, most recently used first; send `next` as `before` for the next page."""

    chats: list[ChatListed]
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
        """Convert a message, without internal details of outages."""
        same = {name: getattr(message, name) for name in cls.model_fields}
        return cls(**{**same, "data": public_message(message.data)})


class Conversation(ChatShown):
    """A chat with all its messages, and the ids of the messages on the active path, first to last."""

    messages: list[MessageShown]
    active: list[str]


class PlaceShown(Shown):
    """Position of a message among its siblings: the `number`-th of `count`, and the ids of its neighbours."""

    number: int
    count: int
    previous_id: str | None
    next_id: str | None


class PlacedMessage(MessageShown):
    """A message of a path, with its position among its siblings."""

    place: PlaceShown


class ChatPath(ChatShown):
    """Consecutive messages of one path through a chat, first to last.

    `has_earlier` and `has_later` say whether the path has more: send the id of the first message as `before`, or of
    the last one as `after`. `end_id` is the last message of the path; null if the chat is empty.
    """

    messages: list[PlacedMessage]
    has_earlier: bool
    has_later: bool
    end_id: str | None

    @classmethod
    def whole(cls, record: ChatRecord, window: PathWindow) -> ChatPath:
        """Convert a chat and a window of one of its paths."""
        placed = [
            PlacedMessage(**MessageShown.of(message).model_dump(), place=PlaceShown.model_validate(place))
            for message, place in zip(window.messages, window.places, strict=True)
        ]
        return cls(
            **ChatShown.of(record).model_dump(),
            messages=placed,
            has_earlier=window.has_earlier,
            has_later=window.has_later,
            end_id=window.end_id,
        )


class AgentShown(Shown):
    """A graph that can answer in a chat; `made_for_chat` if it has a chat start."""

    id: str
    name: str
    version: int
    made_for_chat: bool


class AgentPage(Shown):
    """A page of graphs that can answer in a chat, by id; send `next` as `before` for the next page."""

    agents: list[AgentShown]
    next: str | None


class TurnShown(Shown):
    """A turn: the ids of its messages, and of the run whose events carry the answer."""

    chat_id: str
    run_id: str
    user_message_id: str | None
    message_id: str


class AttachmentShown(Shown):
    """An attachment that messages can refer to."""

    id: str
    name: str
    media_type: str
    size: int
    created_ms: int

    @classmethod
    def of(cls, record: Attachment) -> AttachmentShown:
        """Convert a record."""
        return cls.model_validate(record)


class NodeTypeShown(Shown):
    """A node type: how a palette names it, its handles (None: open), and the JSON Schema of its data.

    A type that does not run provides something that other nodes link to.
    """

    type: str
    title: str
    description: str
    category: str
    runs: bool
    inputs: list[HandleShown] | None
    outputs: list[HandleShown] | None
    data_schema: dict[str, Any] | None


class NodeTypes(Shown):
    """Every node type available to graphs on this server, and which types of values become which on an edge."""

    node_types: list[NodeTypeShown]
    conversions: list[list[str]]


class ToolList(Shown):
    """The ids of the tools that graphs on this server can name."""

    tools: list[str]


class McpServerList(Shown):
    """The names of the MCP servers that graphs on this server can name; never their commands or addresses."""

    mcp_servers: list[str]


class Me(Shown):
    """The authenticated user."""

    name: str
    role: str
    until: Moment | None = Field(description="When the token expires; null if it does not")
    default_limits: dict[str, Any] = Field(description="Limits of a run for the fields that its submission leaves out")
    ceilings: dict[str, Any] = Field(description="Highest limits that a submission may request")


class Health(Shown):
    """The process responds."""

    status: Literal["ok"]


class UnreadableRow(Shown):
    """A stored row that cannot be decoded: its table, its key and the reason."""

    table: str
    key: str
    why: str


class Readiness(Shown):
    """The stores can be read and written; `degraded` if some rows cannot be decoded, which affects only those."""

    status: Literal["ready", "degraded"]
    unreadable: dict[str, int] = Field(default_factory=dict)
    """Number of unreadable rows, by table."""
    rows: list[UnreadableRow] | None = None
    """The unreadable rows, at most 50; only for admins."""


class ErrorFacts(Shown):
    """An error: a code for programs, a sentence for people, and the path of the bad value."""

    code: str
    message: str
    path: str | None = None
    details: list[dict[str, Any]] | None = None


class ErrorShown(Shown):
    """The body of every error response."""

    error: ErrorFacts
