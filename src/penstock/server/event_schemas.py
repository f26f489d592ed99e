"""Every event of a run as a type: a union, discriminated by `type`, for the OpenAPI description and generated clients.

The server does not build these: it sends events as they are stored. A test validates every event that runs emit against
them. An event that could not be stored has only `lost` in its data; clients should show types they do not know.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, TypeAdapter

from penstock.server.schemas import BudgetShown, StopShown

Kind = Literal["system", "llm", "tool"]


class Data(BaseModel):
    """Data of an event; fields without a default are always there."""

    model_config = ConfigDict(extra="forbid")


class StartData(Data):
    epoch: int
    replayed: int | None = Field(None, description="Number of journal entries found; of a resumed run")
    worked_ms: int | None = None
    lost: int | None = Field(None, description="Number of workers lost in a row")


class UsageData(Data):
    cost_usd: float | None
    tokens_in: int
    tokens_out: int
    unresolved_usd: float | None = None
    unknown_costs: int | None = None


class CompletedData(UsageData):
    output: Any
    finish_reason: Any = None


class FailedData(UsageData):
    error: str
    message: str
    node_id: str | None = None


class HaltedData(UsageData):
    stop_reason: str
    message: str
    budget: str | None = None
    unit: str | None = None
    limit: float | None = None
    used: float | None = None
    held: float | None = None
    asked: float | None = None
    momentary: bool | None = None
    whose: Literal["run", "owner", "all", "node"] | None = None
    node_id: str | None = None


class CancelledData(UsageData):
    reason: str
    cause: str


class WaitingData(Data):
    approval_id: str
    idle: bool | None = Field(None, description="Whether nothing else of the run is in progress")


class QueuedData(Data):
    missing: list[str] | None = Field(
        None, description="What the run waits for a worker to have: models, tools and node types of its graph"
    )


class GrantedData(Data):
    limits: dict[str, Any]
    by: str
    grant_id: str


class AskedApproval(Data):
    id: str
    run_id: str
    node_id: str
    question: str
    value: Any
    state: str
    asked_ms: int


class ApprovalRequestedData(Data):
    approval: AskedApproval


class ApprovalAnsweredData(Data):
    approval_id: str
    state: str
    by: str | None


class BillData(Data):
    call_id: str
    name: str | None
    model: str | None
    node_id: str | None = None
    by: str
    cost_usd: float
    tokens_in: int
    tokens_out: int
    held_usd: float


class NodeEventData(Data):
    node_id: str
    node_type: str
    replayed: bool | None = None
    outputs: dict[str, Any] | None = Field(None, description="By handle; of a completed node")
    finish_reason: Any = None
    error: str | None = None
    message: str | None = None
    reason: Any = None


class ProgressData(Data):
    node_id: str
    node_type: str
    replayed: bool | None = None
    name: str
    data: Any


class TextData(Data):
    node_id: str
    source: Any
    text: str


class ToolCallData(Data):
    node_id: str
    source: Any
    call: Any


class CallData(Data):
    call_id: str
    parent_id: str | None
    kind: Kind
    name: str
    node_id: str | None = Field(None, description="Path of the node, such as `each/3/read`; absent outside of any node")
    model: str | None = None
    replayed: bool | None = Field(None, description="Whether it was served from the journal")


class CallStartedData(CallData):
    depth: int
    context: str
    node_type: str | None = Field(None, description="Of the call that executes a node")
    attempt: int | None = None
    iteration: int | None = None
    held_usd: float | None = None


class CallWaitingData(CallData):
    context: str
    stop: StopShown


class CallEndedData(CallData):
    status: Literal["success", "fail", "halt"]
    cost_usd: float | None = Field(description="Null if it was billed at an unknown cost")
    tokens_in: int
    tokens_out: int
    duration_ms: float
    finish_reason: str | None = None
    stop_reason: str | None = None
    error: str | None = None
    retries_used: int | None = None
    abandoned: bool | None = None
    stop: StopShown | None = None


class CallSettledData(Data):
    call_id: str
    node_id: str | None
    cost_usd: float
    tokens_in: int
    tokens_out: int


class LimitData(Data):
    stop_reason: str
    message: str
    budget: str | None
    unit: str | None
    limit: float | None
    used: float | None
    held: float | None
    asked: float | None
    unresolved: float | None
    momentary: bool
    whose: Literal["run", "owner", "all", "node"] | None
    call_id: str | None
    name: str
    node_id: str | None
    cause: bool


class PriceUnknownData(Data):
    model: str | None
    message: str


class ProgramChangedData(Data):
    model_config = ConfigDict(extra="allow")  # figures of the program, which only people read

    node_id: str
    program: Any = None
    message: Any = None


TYPES: dict[str, type[BaseModel]] = {
    "run.queued": QueuedData,
    "run.started": StartData,
    "run.resumed": StartData,
    "run.parked": UsageData,
    "run.waiting": WaitingData,
    "run.granted": GrantedData,
    "run.completed": CompletedData,
    "run.failed": FailedData,
    "run.halted": HaltedData,
    "run.cancelled": CancelledData,
    "approval.requested": ApprovalRequestedData,
    "approval.answered": ApprovalAnsweredData,
    "bill.resolved": BillData,
    "bill.released": BillData,
    "node.started": NodeEventData,
    "node.completed": NodeEventData,
    "node.error": NodeEventData,
    "node.cancelled": NodeEventData,
    "node.skipped": NodeEventData,
    "node.progress": ProgressData,
    "text.delta": TextData,
    "tool.call": ToolCallData,
    "call.started": CallStartedData,
    "call.waiting": CallWaitingData,
    "call.ended": CallEndedData,
    "call.settled": CallSettledData,
    "limit": LimitData,
    "budget": BudgetShown,
    "price.unknown": PriceUnknownData,
    "program.changed": ProgramChangedData,
}
"""The data of each type of event."""


def _event(type_name: str, data: type[BaseModel]) -> type[BaseModel]:
    fields: dict[str, Any] = {"seq": int, "at_ms": int, "type": Literal[type_name], "data": data}
    name = "".join(part.title() for part in type_name.split(".")) + "Event"
    return type(name, (BaseModel,), {"__annotations__": fields, "__doc__": f"The event `{type_name}`."})


_EVENTS: tuple[Any, ...] = tuple(_event(type_name, data) for type_name, data in TYPES.items())
_union: Any = _EVENTS[0]
for _one in _EVENTS[1:]:
    _union = _union | _one
RUN_EVENT: TypeAdapter[Any] = TypeAdapter(Annotated[_union, Discriminator("type")])
"""Validates an event of a run."""
NAME = "RunEvent"


def event_components() -> dict[str, Any]:
    """Return the schemas of all events for the OpenAPI description, the union under `RunEvent`."""
    schema = RUN_EVENT.json_schema(mode="serialization", ref_template="#/components/schemas/{model}")
    definitions: dict[str, Any] = schema.pop("$defs")
    return {**definitions, NAME: schema}
