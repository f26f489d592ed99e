"""The probes: what a program has to do, what the model does meanwhile, and what the measured facts mean.

Knows nothing of contestants. A verdict is made from facts alone: the provider's requests and invoice, and the times
that a program reports. Facts that cannot be judged, e.g. of a program that never called its model, are an error and no
verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.testing.provider import Cut, Fail, Hang, RefuseFree, Say, ToolCall, WireRequest
from tools.prove.site import Site

TOKENS = 20
CENT_USD = 0.001
SOON_S = 2.0
"""Time within which a run returns after a cancel or a time limit."""
LATENCY_S = 0.2
"""Long enough that calls which a program makes at once are in flight together."""
DEFAULTS = Site("", __file__)  # type: ignore[arg-type]


class Kind(StrEnum):
    """What a cell of the table says."""

    HOLDS = "holds"
    FAILS = "does not hold"
    NOT_APPLICABLE = "not applicable"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A kind, and in a few words why."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What was measured of one program. Times are seconds after its first process began."""

    invoice_usd: float = 0.0
    requests: tuple[Mapping[str, Any], ...] = ()
    """Each with `at` and `messages`, its texts as (role, text)."""
    hung_up: tuple[float, ...] = ()
    """When the provider saw a caller disconnect before the answer was complete."""
    reports: tuple[Mapping[str, Any], ...] = ()
    """What the program reported, in order."""
    problem: str = ""
    """Why nothing can be said: the program raised, could not be started, or did not end where it has to."""
    ended: bool = True
    """False if the program was still running when its time was over."""

    def all(self, kind: str) -> list[Mapping[str, Any]]:
        return [report for report in self.reports if report["kind"] == kind]

    def at(self, kind: str) -> float | None:
        """When this was first reported."""
        return next((float(report["at"]) for report in self.all(kind)), None)

    def asked(self, text: str) -> int:
        """Number of requests whose last message says this."""
        return sum(bool(r["messages"]) and text in r["messages"][-1][1] for r in self.requests)


class Unclear(Exception):
    """The facts say nothing about the contestant."""


Script = Callable[[WireRequest], Any]
Judge = Callable[[Facts], Verdict]


@dataclass(frozen=True, slots=True)
class Probe:
    """One question to every contestant."""

    name: str
    title: str
    task: str
    """What the program does, and when the cell holds."""
    script: Callable[[], Script]
    judge: Judge
    kill_at: str = ""
    """The program is killed when a request with this text is being answered, and started again."""
    max_s: float = 90.0
    may_hang: bool = False
    """A program that does not end is a finding here; elsewhere it is an error."""
    latency_s: float = field(default=LATENCY_S)


def verdict(probe: Probe, facts: Facts) -> Verdict:
    """Judge what was measured."""
    if facts.problem:
        return Verdict(Kind.ERROR, facts.problem)
    if not facts.ended and not probe.may_hang:
        return Verdict(Kind.ERROR, f"did not end within {probe.max_s:g} s")
    try:
        return probe.judge(facts)
    except Unclear as error:
        return Verdict(Kind.ERROR, str(error))


def _answer(request: WireRequest) -> Say:
    return Say("done", output_tokens=TOKENS)


def _fan_out() -> Script:
    """Play a model that asks for twenty tool calls at once if it has a tool, and answers after their results."""

    def script(request: WireRequest) -> Say:
        tools = _tools(request)
        if not tools or _has_result(request):
            return _answer(request)
        name, arguments = tools[0]
        calls = (ToolCall(name, dict.fromkeys(arguments, f"dam {at}")) for at in range(DEFAULTS.calls))
        return Say(tool_calls=tuple(calls), output_tokens=TOKENS)

    return script


def _one_tool() -> Script:
    def script(request: WireRequest) -> Say:
        tools = _tools(request)
        if not tools or _has_result(request):
            return _answer(request)
        name, arguments = tools[0]
        return Say(tool_calls=(ToolCall(name, arguments),), output_tokens=TOKENS)

    return script


def _first_hangs() -> Script:
    asked: list[int] = []

    def script(request: WireRequest) -> Say:
        asked.append(request.number)
        return Say(output_tokens=TOKENS, then=Hang()) if len(asked) == 1 else _answer(request)

    return script


def _by_case() -> Script:
    def script(request: WireRequest) -> Any:
        text = all_text(request)
        if "case fail" in text:
            return Say(output_tokens=TOKENS, then=Fail(400))
        if "case cancel" in text:
            return Say(output_tokens=TOKENS, then=Hang())
        return _answer(request)

    return script


def _second_hangs() -> Script:
    hung: list[int] = []

    def script(request: WireRequest) -> Say:
        tools = _tools(request)
        if tools:  # a lead whose tools take the steps, one after the other
            done = sum(role == "tool" for role, _ in messages_of(request))
            calls = tuple(ToolCall(name, arguments) for name, arguments in tools[done : done + 1])
            return Say("" if calls else "two", calls, output_tokens=TOKENS)
        if "second step" in request.last_text and not hung:
            hung.append(request.number)
            return Say(output_tokens=TOKENS, then=Hang())
        return Say("two" if "second step" in request.last_text else "one", output_tokens=TOKENS)

    return script


def _second_question_hangs() -> Script:
    hung: list[int] = []

    def script(request: WireRequest) -> Say:
        text = request.last_text
        if "question two" in text and not hung:
            hung.append(request.number)
            return Say("answer two, which is cut short", then=Hang(after=3 if request.streams else None))
        return Say(text.replace("question", "answer") if "question" in text else "answer", output_tokens=TOKENS)

    return script


def _tools(request: WireRequest) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for tool in request.fields.get("tools") or ():
        function = tool.get("function", tool)
        schema = function.get("parameters") or {}
        found.append((function["name"], dict.fromkeys(schema.get("required") or (), "dams")))
    return found


def _has_result(request: WireRequest) -> bool:
    messages = request.fields.get("messages") or request.fields.get("input") or ()
    return any(
        isinstance(item, dict) and (item.get("role") == "tool" or item.get("type") == "function_call_output")
        for item in messages
    )


def messages_of(request: WireRequest) -> list[tuple[str, str]]:
    """Return role and text of each message of a request."""
    given = request.fields.get("messages") or request.fields.get("input") or ()
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [(str(item.get("role", "")), _text(item.get("content"))) for item in items if isinstance(item, dict)]


def all_text(request: WireRequest) -> str:
    """Return the text of all messages of a request."""
    return "\n".join(text for _, text in messages_of(request))


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def _spent(facts: Facts) -> Verdict:
    if not facts.requests:
        raise Unclear("the program made no request")
    amount = f"${facts.invoice_usd:.2f} of ${DEFAULTS.ceiling_usd:.2f}"
    if facts.invoice_usd > DEFAULTS.ceiling_usd + CENT_USD:
        return Verdict(Kind.FAILS, f"{amount} spent{'' if facts.ended else ', and not over'}")
    if not facts.ended:
        raise Unclear(f"did not end, {amount} spent")
    if len(facts.requests) < 2 and not facts.all("stopped"):
        raise Unclear(f"one request only, {amount}: nothing was tried at once")
    return Verdict(Kind.HOLDS, f"{amount} spent")


def _retried(facts: Facts) -> Verdict:
    count, most = len(facts.requests), 1 + DEFAULTS.max_retries
    if count < 2:
        raise Unclear(f"{count} requests: nothing was retried")
    if count > most:
        return Verdict(Kind.FAILS, f"{count} requests, {most} allowed{'' if facts.ended else ', and not over'}")
    if not facts.ended:
        raise Unclear(f"did not end, {count} requests")
    return Verdict(Kind.HOLDS, f"{count} requests, {most} allowed")


def _not_asked(facts: Facts) -> Verdict:
    if facts.at("cancel") is None:
        raise Unclear("the program did not cancel")
    count = len(facts.requests)
    if count:
        return Verdict(Kind.FAILS, f"{count} requests after the cancel, ${facts.invoice_usd:.2f}")
    if not facts.ended:
        return Verdict(Kind.FAILS, "never returned")
    return Verdict(Kind.HOLDS, "no request")


def _ended_by_cancel(facts: Facts) -> Verdict:
    cancelled, returned = facts.at("cancel"), facts.at("returned")
    if cancelled is None or not facts.requests:
        raise Unclear("the program did not cancel a request in flight")
    after = sum(float(request["at"]) > cancelled for request in facts.requests)
    if returned is None:
        return Verdict(Kind.FAILS, "the run never returned" + (f", {after} requests after the cancel" if after else ""))
    taken = returned - cancelled
    if after:
        return Verdict(Kind.FAILS, f"{after} requests after the cancel")
    if taken > SOON_S:
        return Verdict(Kind.FAILS, f"returned {taken:.1f} s after the cancel")
    if not any(at <= returned + SOON_S / 2 for at in facts.hung_up):
        return Verdict(Kind.FAILS, "returned, and its request went on")
    return Verdict(Kind.HOLDS, f"returned after {taken:.1f} s, request closed")


def _ended_in_time(facts: Facts) -> Verdict:
    began, returned = facts.at("began"), facts.at("returned")
    if began is None or facts.at("tool") is None:
        raise Unclear("the tool did not run")
    if returned is None:
        return Verdict(Kind.FAILS, "the run never returned")
    taken = returned - began
    kind = Kind.HOLDS if taken <= DEFAULTS.timeout_s + SOON_S else Kind.FAILS
    return Verdict(kind, f"returned after {taken:.1f} s, limit {DEFAULTS.timeout_s:g} s")


def _one_end_each(facts: Facts) -> Verdict:
    counts = Counter((str(event["case"]), str(event["kind_of"])) for event in facts.all("event"))
    cases = ("complete", "fail", "cancel")
    if not counts:
        raise Unclear("the program reported no event")
    if len(facts.requests) < len(cases):
        raise Unclear(f"{len(facts.requests)} requests for {len(cases)} runs")
    wrong = [case for case in cases if (counts[case, "start"], counts[case, "end"]) != (1, 1)]
    if not wrong:
        return Verdict(Kind.HOLDS, "one start and one end in all three")
    shown = ", ".join(f"{case}: {counts[case, 'start']} start, {counts[case, 'end']} end" for case in wrong)
    return Verdict(Kind.FAILS, shown)


def _not_paid_twice(facts: Facts) -> Verdict:
    if not facts.asked("second step"):
        raise Unclear("the second step was not reached")
    first, done = facts.asked("first step"), facts.all("answer")
    if not done:
        return Verdict(Kind.FAILS, f"not finished; first step paid {first}×")
    if "two" not in done[-1]["text"]:
        raise Unclear(f"the run came to {done[-1]['text']!r}")
    return Verdict(Kind.HOLDS if first == 1 else Kind.FAILS, f"finished; first step paid {first}×")


def _all_there(facts: Facts) -> Verdict:
    last = next(
        (r for r in reversed(facts.requests) if r["messages"] and "question three" in r["messages"][-1][1]), None
    )
    if last is None:
        raise Unclear("the third question was not asked")
    texts = [text for _, text in last["messages"]]
    counts = {
        wanted: sum(wanted in text for text in texts) for wanted in ("question one", "answer one", "question two")
    }
    wrong = [f"{wanted!r} {'lost' if not count else f'{count}×'}" for wanted, count in counts.items() if count != 1]
    return Verdict(Kind.FAILS, ", ".join(wrong)) if wrong else Verdict(Kind.HOLDS, "nothing lost, nothing twice")


PROBES: dict[str, Probe] = {
    probe.name: probe
    for probe in (
        Probe(
            "budget",
            "Budget under concurrency",
            "One run makes twenty model calls at once, at $0.02 each, under a ceiling of $0.10 (or of five calls, "
            "where the limit counts calls). It holds if the invoice is not over $0.10.",
            lambda: _answer,
            _spent,
        ),
        Probe(
            "subagents",
            "Budget of sub-agents",
            "A lead agent calls a tool twenty times at once, and each call asks a sub-agent, at $0.02 a model call. "
            "The ceiling is $0.10: five model calls, or three of the tool and two of the lead where tool calls are "
            "counted. It holds if the invoice is not over $0.10.",
            _fan_out,
            _spent,
        ),
        Probe(
            "failures",
            "Billed failures",
            "The connection breaks at every request, after the provider generated, and billed, its answer. The program "
            "asks up to twenty times in one run, with the client's own retries. It holds if the invoice is not over "
            "$0.10.",
            lambda: lambda request: Say(output_tokens=TOKENS, then=Cut()),
            _spent,
            may_hang=True,
            latency_s=0.02,
        ),
        Probe(
            "retries",
            "Nested retries",
            "The provider is away (503, free). The client retries twice, so does the step around it, so does the run "
            "around the step; the run allows three retries in all. It holds if no more than four requests arrive.",
            lambda: lambda request: RefuseFree(503, retry_after_s=0.01),
            _retried,
            may_hang=True,
            latency_s=0.02,
        ),
        Probe(
            "cancel_before",
            "Cancel before the start",
            "The run is cancelled before it starts, then started. It holds if the provider receives no request.",
            lambda: _answer,
            _not_asked,
            max_s=40,
            may_hang=True,
        ),
        Probe(
            "cancel_during",
            "Cancel during a call",
            "A run of three model calls is cancelled while the provider does not answer the first. It holds if the run "
            "returns within two seconds, its request is closed, and no other follows.",
            _first_hangs,
            _ended_by_cancel,
            max_s=40,
            may_hang=True,
        ),
        Probe(
            "timeouts",
            "Time limit of sync work",
            "A sync tool blocks for eight seconds in a run that may take two. It holds if the run returns within four.",
            _one_tool,
            _ended_in_time,
            max_s=60,
            may_hang=True,
            latency_s=0.02,
        ),
        Probe(
            "events",
            "Terminal events",
            "Three runs, of which one completes, one fails and one is cancelled, and their events. It holds if each "
            "has one event that starts it and one that ends it.",
            _by_case,
            _one_end_each,
            latency_s=0.02,
        ),
        Probe(
            "resume",
            "Resume after a kill",
            "A run of two model calls is killed (SIGKILL) during the second, and continued by a new process. It holds "
            "if the run finishes and the first call was paid once.",
            _second_hangs,
            _not_paid_twice,
            kill_at="second step",
        ),
        Probe(
            "chat",
            "Chat storage",
            "A chat is killed (SIGKILL) while its second question is answered; a new process asks a third. It holds if "
            "the model is sent the first question, its answer and the second question, each once.",
            _second_question_hangs,
            _all_there,
            kill_at="question two",
        ),
    )
}
