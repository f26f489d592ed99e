"""Options of a node in a JSON graph beyond its settings: an error policy and a budget of its own.

Both are in the data of the node, whatever its type, beside the settings of its executor:

    "data": {"error_policy": {"on_error": "fallback", "fallback_value": "none", "retry_count": 2}, "budget": {…}}

They become the `StepOptions` of the scheduler, as the options of steps do; `recovery` implements retries, delays and
fallbacks. Executors do not see them when they run. This module defines the replacement for the outputs of a failed
node:

- `skip` gives no output, unless there is a `fallback_value`: nodes that depend on this one alone are skipped.
- `fallback` gives `fallback_value`.
- `continue` gives the error, as `{"error": …, "message": …}`.

The value is emitted on `output`, or on the `fallback_handle` that the policy names. The type need not declare that
handle: edges can leave it like any other, so that a failure takes a branch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from penstock.errors import InvalidValue
from penstock.kernel.executor import DataValue, ExecutionResult, Handle, type_of
from penstock.kernel.graph import DEFAULT_OUTPUT, MAX_NAME_LENGTH, NodeSpec, thawed
from penstock.policies import MAX_WHOLE, ErrorPolicy, OnError
from penstock.runtime.graphs.settings import OPTIONS, BudgetData, Data, Finding, Settings, Sized, Within
from penstock.runtime.scheduling.recovery import StepOptions

ERROR_POLICY = "error_policy"
NOTHING = ExecutionResult()
"""The result of a node that used no handle."""
PLAIN = StepOptions()
ON_A_THREAD = StepOptions(on_thread=True)


@dataclass(frozen=True, slots=True)
class ErrorPolicyData(Data):
    """What happens when the node fails: retries first, then what `on_error` says."""

    on_error: OnError = "fail"
    retry_count: Annotated[int, Within(0, MAX_WHOLE)] = 0
    retry_delay_ms: Annotated[int, Within(0, MAX_WHOLE)] = 1000
    retry_backoff: Annotated[float, Within(1, 1_000)] = 2.0
    retry_jitter: Annotated[float, Within(0, 1)] = 0.1
    timeout_ms: Annotated[int, Within(1, MAX_WHOLE)] | None = None
    fallback_value: Any = None
    fallback_handle: Annotated[str, Sized(1, MAX_NAME_LENGTH)] | None = None

    def policy(self) -> ErrorPolicy:
        """Return the runtime's ErrorPolicy; raises InvalidValue for settings that contradict each other."""
        return ErrorPolicy(
            on_error=self.on_error,
            retry_count=self.retry_count,
            retry_delay_ms=self.retry_delay_ms,
            retry_backoff=self.retry_backoff,
            timeout_ms=self.timeout_ms,
            fallback_value=self.fallback_value,
            retry_jitter=self.retry_jitter,
        )

    @property
    def gives_value(self) -> bool:
        """Whether the node has an output after its final failure."""
        return self.on_error in ("fallback", "continue") or self.fallback_value is not None


@dataclass(frozen=True, slots=True)
class OptionsData(Data):
    """The options in the data of a node."""

    error_policy: ErrorPolicyData | None = None
    budget: BudgetData | None = None


SETTINGS: Settings[OptionsData] = Settings(OptionsData, runs=False)


class NodeOptions:
    """The options, in the form the kernel needs to validate a graph."""

    names = frozenset(OPTIONS)

    def check(self, data: Mapping[str, Any], outputs: Mapping[str, Handle] | None, runs: bool) -> Iterator[Finding]:
        """Yield every problem with the options in the data of a node that declares these outputs."""
        if ERROR_POLICY in data and not runs:
            yield f".{ERROR_POLICY}", "the node does not run: it is only linked to; set it on the node that uses it"
        given = _given(data)
        read = SETTINGS.read_or_none(given)
        if read is None:
            yield from SETTINGS.findings(given)
        elif read.error_policy is not None:
            for field, sentence in _contradictions(read.error_policy, outputs):
                yield f".{ERROR_POLICY}.{field}", sentence

    def output(self, data: Mapping[str, Any]) -> str | None:
        """Return the handle that the error policy of a node adds to those of its type, or None."""
        policy = data.get(ERROR_POLICY)
        handle = policy.get("fallback_handle") if isinstance(policy, Mapping) else None
        return handle if isinstance(handle, str) else None


NODE_OPTIONS = NodeOptions()


def _given(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: thawed(data[name]) for name in OPTIONS if name in data}


def _contradictions(read: ErrorPolicyData, outputs: Mapping[str, Handle] | None) -> Iterator[tuple[str, str]]:
    if read.on_error == "fallback" and read.fallback_value is None:
        yield "fallback_value", "with on_error 'fallback' this is needed, and it is not there"
        return
    try:
        read.policy()
    except InvalidValue as invalid:
        yield invalid.field, f"must be {invalid.expected}"
        return
    handle = read.fallback_handle
    if not read.gives_value:
        if handle is not None:
            yield "fallback_handle", "must be left out where on_error gives no value: 'fail', 'retry', a bare 'skip'"
    elif outputs is not None:
        flow = [one.name for one in outputs.values() if one.channel == "flow"]
        if handle is None and DEFAULT_OUTPUT not in flow:
            known = ", ".join(flow) or "none"
            yield "fallback_handle", f"this is needed: the node has no handle 'output'; it has: {known}"
        elif handle in outputs and handle not in flow:
            yield "fallback_handle", f"handle {handle!r} is for links"


def own_data(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the data without the options: the settings of the node's executor."""
    return data if NodeOptions.names.isdisjoint(data) else {k: v for k, v in data.items() if k not in OPTIONS}


def linked_data(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the data of a node that is linked to: its executor handles the budget there."""
    return {k: v for k, v in data.items() if k != ERROR_POLICY} if ERROR_POLICY in data else data


def options_of(node: NodeSpec, blocking: bool) -> StepOptions | None:
    """Return the options of a node of a validated graph; None if it has none."""
    options = ON_A_THREAD if blocking else None
    if NodeOptions.names.isdisjoint(node.data):
        return options
    read = SETTINGS.read(_given(node.data))
    if read.budget is not None:
        options = replace(options or PLAIN, sub_budget=read.budget.budget(), is_graph=True)
    if read.error_policy is not None:
        stand_in = _stand_in(read.error_policy.fallback_handle or DEFAULT_OUTPUT)
        options = replace(options or PLAIN, policy=read.error_policy.policy(), stand_in=stand_in)
    return options


def _stand_in(handle: str) -> Callable[[Any], ExecutionResult]:
    def result(value: Any) -> ExecutionResult:
        return NOTHING if value is None else ExecutionResult({handle: DataValue(type_of(value), thawed(value))})

    return result
