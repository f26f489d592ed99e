"""Any hook may object, with a reason; a broken hook lets nothing through."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.containment.safety import Decision, SafetyEvent, ToolCallContext
from penstock.containment.shield import (
    GOES_ON,
    QUESTIONS,
    BudgetHook,
    EgressHook,
    PreDispatchHook,
    RetryHook,
    ShieldPipeline,
    Slot,
    ToolDispatchHook,
    Verdict,
)
from penstock.containment.window import BudgetWindowHook
from penstock.errors import CancelledError, InvalidValue
from penstock.stops import StopReason
from penstock.testing import ManualClock
from penstock.testing.contracts.threads import giving_way

CALL = ToolCallContext(request_id="r-1", tool_name="search")
ARGUMENTS: dict[Slot, tuple[Any, ...]] = {
    Slot.PRE_DISPATCH: (),
    Slot.TOOL_DISPATCH: (),
    Slot.EGRESS: ("https://example.org", "GET"),
    Slot.RETRY: (ValueError("no"),),
    Slot.BUDGET: (0.25,),
}
BEFORE = [slot for slot in Slot if slot is not Slot.RETRY]
REFUSALS = [Decision.HALT, Decision.QUARANTINE, Decision.QUEUE]


class Saying:
    """A hook for every slot that gives one answer, or raises it, and counts its calls."""

    def __init__(self, answer: object = None) -> None:
        self.answer = answer
        self.calls = 0

    def answered(self) -> Any:
        self.calls += 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def before_llm_call(self, ctx: ToolCallContext) -> Any:
        return self.answered()

    def before_tool_call(self, ctx: ToolCallContext) -> Any:
        return self.answered()

    def before_egress(self, ctx: ToolCallContext, url: str, method: str) -> Any:
        return self.answered()

    def on_error(self, ctx: ToolCallContext, err: BaseException) -> Any:
        return self.answered()

    def before_charge(self, ctx: ToolCallContext, cost_usd: float) -> Any:
        return self.answered()


def with_hooks(slot: Slot, *hooks: object) -> ShieldPipeline:
    given_hooks: dict[str, Any] = {str(slot): list(hooks)}
    return ShieldPipeline(**given_hooks)


def judged(slot: Slot, *answers: object) -> Verdict | None:
    return with_hooks(slot, *map(Saying, answers)).judge(slot, CALL, *ARGUMENTS[slot])


def verdict_of(slot: Slot, *answers: object) -> Verdict:
    verdict = judged(slot, *answers)
    assert verdict is not None
    return verdict


@pytest.mark.requirement("C-8")
@pytest.mark.parametrize("slot", Slot)
@pytest.mark.parametrize("answers", [(), (None,), (Decision.ALLOW,), (None, Decision.ALLOW, Verdict(Decision.ALLOW))])
def test_none_and_allow_are_no_opinion(slot: Slot, answers: tuple[object, ...]) -> None:
    assert judged(slot, *answers) is None


@pytest.mark.requirement("C-8")
@pytest.mark.parametrize("slot", Slot)
@pytest.mark.parametrize("refusal", REFUSALS)
def test_the_first_refusal_wins_and_later_hooks_are_not_called(slot: Slot, refusal: Decision) -> None:
    hooks = [Saying(), Saying(refusal), Saying(Decision.HALT)]
    verdict = with_hooks(slot, *hooks).judge(slot, CALL, *ARGUMENTS[slot])
    assert verdict is not None
    assert verdict.decision is refusal
    assert [hook.calls for hook in hooks] == [1, 1, 0]


@pytest.mark.requirement("C-8")
@pytest.mark.parametrize("slot", Slot)
def test_a_later_refusal_outweighs_an_earlier_degrade(slot: Slot) -> None:
    assert verdict_of(slot, Decision.DEGRADE, None, Decision.HALT).decision is Decision.HALT


def test_of_several_degrades_the_first_is_given() -> None:
    cheap, cheaper = Verdict.degrade(model="cheap"), Verdict.degrade(model="cheaper")
    assert verdict_of(Slot.PRE_DISPATCH, None, cheap, cheaper, None).model == "cheap"


@pytest.mark.requirement("C-8")
@pytest.mark.parametrize("slot", BEFORE)
def test_retry_before_a_call_refuses_it(slot: Slot) -> None:
    later = Saying(Decision.DEGRADE)
    verdict = with_hooks(slot, Saying(Decision.RETRY), later).judge(slot, CALL, *ARGUMENTS[slot])
    assert verdict is not None
    assert verdict.decision is Decision.RETRY
    assert later.calls == 0


@pytest.mark.requirement("C-8")
def test_retry_after_an_error_stands_unless_a_later_hook_refuses() -> None:
    assert verdict_of(Slot.RETRY, Decision.RETRY, None).decision is Decision.RETRY
    assert verdict_of(Slot.RETRY, Decision.RETRY, Decision.HALT).decision is Decision.HALT
    assert verdict_of(Slot.RETRY, Decision.RETRY, Decision.DEGRADE).decision is Decision.RETRY


@given(
    slot=st.sampled_from(Slot),
    answers=st.lists(st.one_of(st.none(), st.sampled_from(Decision), st.sampled_from(["HALT", True, 0]))),
)
@pytest.mark.requirement("C-8")
def test_any_answers_in_any_order_give_the_verdict_of_the_rules(slot: Slot, answers: list[object]) -> None:
    decisions = [answer if answer is None or isinstance(answer, Decision) else Decision.HALT for answer in answers]
    opinions = [answer for answer in decisions if answer not in (None, Decision.ALLOW)]
    refusals = [answer for answer in opinions if answer not in GOES_ON[slot]]
    expected = next(iter(refusals + opinions), None)
    verdict = judged(slot, *answers)
    assert (verdict and verdict.decision) == expected


@pytest.mark.requirement("C-8")
@pytest.mark.parametrize("slot", Slot)
@pytest.mark.parametrize("decision", [decision for decision in Decision if decision is not Decision.ALLOW])
def test_a_bare_decision_gets_a_reason_that_names_hook_and_answer(slot: Slot, decision: Decision) -> None:
    verdict = verdict_of(slot, decision)
    assert verdict.reason == f"Saying.{QUESTIONS[slot][0]} returned {decision}"
    assert verdict.hook == "Saying"
    assert verdict.stop_reason is StopReason.HOOK_DENIED


@pytest.mark.requirement("C-8")
def test_the_reason_a_hook_gives_is_kept_and_its_name_is_filled_in() -> None:
    verdict = verdict_of(Slot.TOOL_DISPATCH, Verdict.deny("no shell on Fridays"))
    assert verdict == Verdict(Decision.HALT, "no shell on Fridays", "Saying", StopReason.HOOK_DENIED)


@pytest.mark.requirement("C-8")
def test_a_hook_may_name_the_model_to_degrade_to() -> None:
    verdict = verdict_of(Slot.PRE_DISPATCH, Verdict.degrade(model="small-model", reason="budget is low"))
    assert verdict == Verdict(Decision.DEGRADE, "budget is low", "Saying", model="small-model")


def test_a_verdict_without_words_gets_the_same_reason_as_a_bare_decision() -> None:
    assert verdict_of(Slot.PRE_DISPATCH, Verdict.degrade()).reason == "Saying.before_llm_call returned DEGRADE"


@pytest.mark.requirement("C-8", "C-11")
def test_the_stop_reason_is_the_verdicts_or_else_the_hooks() -> None:
    class Limiting(Saying):
        stop_reason = StopReason.PROVIDER_RATE_LIMIT

    def stop_reason(answer: object) -> StopReason:
        verdict = with_hooks(Slot.EGRESS, Limiting(answer)).judge(Slot.EGRESS, CALL, "https://x.org", "GET")
        assert verdict is not None
        return verdict.stop_reason

    assert stop_reason(Decision.HALT) is StopReason.PROVIDER_RATE_LIMIT
    assert stop_reason(Verdict.deny("full")) is StopReason.PROVIDER_RATE_LIMIT
    assert stop_reason(Verdict.deny("too dear", stop_reason=StopReason.BUDGET_EXCEEDED)) is StopReason.BUDGET_EXCEEDED
    assert stop_reason(ValueError("broken")) is StopReason.HOOK_DENIED, "a broken hook is not a rate limit"


@pytest.mark.requirement("C-8", "C-9", "C-11")
def test_a_full_window_refuses_with_its_own_words_and_reason() -> None:
    clock = ManualClock()
    pipeline = ShieldPipeline(pre_dispatch=BudgetWindowHook(1, 60.0, clock=clock))
    assert pipeline.judge(Slot.PRE_DISPATCH, CALL) is None
    clock.advance(20)
    assert pipeline.judge(Slot.PRE_DISPATCH, CALL) == Verdict(
        Decision.HALT,
        "1 of 1 calls in the last 60 s; a slot is free in 40 s",
        "BudgetWindowHook",
        StopReason.PROVIDER_RATE_LIMIT,
    )


@pytest.mark.parametrize(
    ("explain", "reason"),
    [
        (lambda: "because", "because"),
        (lambda: "", "Explaining.before_llm_call returned HALT"),
        (lambda: 7, "Explaining.before_llm_call returned HALT"),
        (lambda: 1 / 0, "Explaining.before_llm_call returned HALT, and its explain() raised ZeroDivisionError: "),
    ],
)
def test_what_explain_says_is_the_reason_and_what_it_breaks_does_not_break_the_denial(
    explain: Callable[[], object], reason: str
) -> None:
    class Explaining(Saying):
        def explain(self) -> object:
            return explain()

    verdict = with_hooks(Slot.PRE_DISPATCH, Explaining(Decision.HALT)).judge(Slot.PRE_DISPATCH, CALL)
    assert verdict is not None
    assert verdict.decision is Decision.HALT
    assert verdict.reason.startswith(reason)


def test_hooks_may_be_named_in_any_script() -> None:
    wächter = type("Wächter守", (Saying,), {})
    verdict = with_hooks(Slot.PRE_DISPATCH, wächter(Decision.HALT)).judge(Slot.PRE_DISPATCH, CALL)
    assert verdict is not None
    assert verdict.hook == "Wächter守"


@pytest.mark.requirement("C-8")
@pytest.mark.parametrize("slot", Slot)
def test_a_hook_that_raises_halts_the_call_and_is_named(slot: Slot) -> None:
    error = RuntimeError("database is gone")
    verdict = verdict_of(slot, Decision.DEGRADE, error)
    assert verdict.decision is Decision.HALT
    assert verdict.reason == f"Saying.{QUESTIONS[slot][0]} raised RuntimeError: database is gone"
    assert verdict.error is error


@pytest.mark.requirement("C-8")
@pytest.mark.parametrize("slot", Slot)
@pytest.mark.parametrize("answer", [True, False, 0, "HALT", "ALLOW", "", StopReason.ABORTED, (), object(), Verdict])
def test_an_answer_that_is_none_halts_the_call(slot: Slot, answer: object) -> None:
    verdict = verdict_of(slot, answer)
    assert verdict.decision is Decision.HALT
    assert verdict.reason.startswith(f"Saying.{QUESTIONS[slot][0]} returned ")
    assert verdict.reason.endswith("neither a Decision nor a Verdict nor None")


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(1), CancelledError("stop"), asyncio.CancelledError(), GeneratorExit()]
)
def test_what_is_not_an_exception_passes_through(error: BaseException) -> None:
    with pytest.raises(type(error)):
        judged(Slot.PRE_DISPATCH, error)


def test_errors_and_answers_that_cannot_even_be_shown_halt_the_call() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise ValueError

        __repr__ = __str__

    assert verdict_of(Slot.PRE_DISPATCH, Unspeakable()).reason == "Saying.before_llm_call raised Unspeakable"

    class Opaque:
        def __repr__(self) -> str:
            raise ValueError

    assert verdict_of(Slot.PRE_DISPATCH, Opaque()).reason.startswith("Saying.before_llm_call returned a Opaque,")


def test_a_huge_error_message_is_cut() -> None:
    assert len(verdict_of(Slot.PRE_DISPATCH, ValueError("x" * 1_000_000)).reason) < 1_000


def test_a_hook_that_turns_out_to_be_async_halts_the_call_and_leaves_no_coroutine_behind() -> None:
    async def late() -> Decision:
        return Decision.ALLOW

    class Late:
        def before_llm_call(self, ctx: ToolCallContext) -> Any:
            return late()

    verdict = with_hooks(Slot.PRE_DISPATCH, Late()).judge(Slot.PRE_DISPATCH, CALL)
    assert verdict is not None
    assert verdict.decision is Decision.HALT
    assert "coroutine" in verdict.reason


@pytest.mark.parametrize(
    "make",
    [
        lambda: Verdict("HALT"),  # type: ignore[arg-type]
        lambda: Verdict(Decision.HALT, None),  # type: ignore[arg-type]
        lambda: Verdict(Decision.HALT, stop_reason="budget_exceeded"),  # type: ignore[arg-type]
        lambda: Verdict.degrade(model=7),  # type: ignore[arg-type]
    ],
)
def test_a_verdict_made_of_the_wrong_things_is_refused(make: Callable[[], Verdict]) -> None:
    with pytest.raises(InvalidValue):
        make()


def test_a_verdict_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Verdict.deny("no").reason = "yes"  # type: ignore[misc]


@pytest.mark.parametrize("slot", Slot)
@pytest.mark.parametrize("hook", [object(), "before_llm_call", 7, True, lambda ctx: None])
def test_a_hook_without_its_method_is_refused_by_slot_and_class(slot: Slot, hook: object) -> None:
    with pytest.raises(
        InvalidValue, match=rf"^{slot} must be a hook with {QUESTIONS[slot][0]}\(ctx.*{type(hook).__name__}"
    ):
        with_hooks(slot, Saying(), hook)


def test_none_among_hooks_is_refused() -> None:
    with pytest.raises(InvalidValue, match="egress"):
        ShieldPipeline(egress=[None])  # type: ignore[list-item]


def test_a_class_instead_of_an_instance_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"an instance such as Saying\(\), not the class"):
        ShieldPipeline(pre_dispatch=Saying)  # type: ignore[arg-type]


def test_a_method_that_takes_other_arguments_is_refused() -> None:
    class Forgetful:
        def before_egress(self, ctx: ToolCallContext) -> None: ...

    with pytest.raises(
        InvalidValue, match=r"before_egress\(ctx, url, method\), but Forgetful.before_egress takes other"
    ):
        ShieldPipeline(egress=Forgetful())  # type: ignore[arg-type]


async def ask_later(*args: object) -> None: ...


class AskLater:
    async def __call__(self, *args: object) -> None: ...


@pytest.mark.parametrize("method", [ask_later, functools.partial(ask_later), AskLater()])
def test_async_methods_are_refused_with_advice(method: object) -> None:
    hook = Saying()
    hook.on_error = method  # type: ignore[method-assign, assignment]
    with pytest.raises(InvalidValue, match=r"retry must be a hook that answers at once, but Saying.on_error is async"):
        ShieldPipeline(retry=hook)


def test_an_async_explain_is_refused() -> None:
    hook = Saying()
    hook.explain = ask_later  # type: ignore[attr-defined]
    with pytest.raises(InvalidValue, match=r"Saying.explain is async"):
        ShieldPipeline(budget=hook)


def test_a_stop_reason_that_is_none_of_ours_is_refused() -> None:
    hook = Saying()
    hook.stop_reason = "because"  # type: ignore[attr-defined]
    with pytest.raises(InvalidValue, match=r"Saying.stop_reason must be one of StopReason"):
        ShieldPipeline(budget=hook)


@pytest.mark.parametrize("value", [-1, True, 1.5, float("nan"), None, "9"])
def test_a_number_of_events_that_is_none_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidValue, match="max_events"):
        ShieldPipeline(max_events=value)


def test_one_hook_a_list_and_a_tuple_are_all_taken_and_later_changes_of_the_list_are_not() -> None:
    hooks = [Saying()]
    pipeline = ShieldPipeline(Saying(), hooks, (Saying(), Saying(Decision.QUEUE)))
    hooks.append(Saying(Decision.HALT))
    assert pipeline.before_llm_call(CALL) is Decision.ALLOW
    assert pipeline.before_tool_call(CALL) is Decision.ALLOW
    assert pipeline.before_egress(CALL, "https://x.org", "GET") is Decision.QUEUE


def test_an_empty_slot_says_so() -> None:
    pipeline = ShieldPipeline(egress=[], budget=Saying())
    assert [slot for slot in Slot if pipeline.has(slot)] == [Slot.BUDGET]


def test_the_protocols_distinguish_hooks_from_other_objects() -> None:
    for protocol in (PreDispatchHook, ToolDispatchHook, EgressHook, RetryHook, BudgetHook):
        assert isinstance(Saying(), protocol)
        assert not isinstance(object(), protocol)
    assert isinstance(BudgetWindowHook(1), PreDispatchHook)
    assert isinstance(BudgetWindowHook(1), ToolDispatchHook)


def test_hooks_are_given_what_they_decide_on() -> None:
    given_to_hook: list[tuple[object, ...]] = []

    class Noting(Saying):
        def before_egress(self, ctx: ToolCallContext, url: str, method: str) -> None:
            given_to_hook.append((ctx, url, method))

        def on_error(self, ctx: ToolCallContext, err: BaseException) -> None:
            given_to_hook.append((ctx, err))

        def before_charge(self, ctx: ToolCallContext, cost_usd: float) -> None:
            given_to_hook.append((ctx, cost_usd))

    hook, error = Noting(), ValueError("no")
    pipeline = ShieldPipeline(egress=hook, retry=hook, budget=hook)
    pipeline.before_egress(CALL, "https://x.org", "POST")
    pipeline.on_error(CALL, error)
    pipeline.before_charge(CALL, 0.5)
    assert given_to_hook == [(CALL, "https://x.org", "POST"), (CALL, error), (CALL, 0.5)]


def ask(pipeline: ShieldPipeline, slot: Slot) -> Decision:
    decision: Decision = getattr(pipeline, QUESTIONS[slot][0])(CALL, *ARGUMENTS[slot])
    return decision


@pytest.mark.requirement("C-8")
def test_without_objections_calls_are_allowed_errors_are_retried_and_nothing_is_logged() -> None:
    pipeline = ShieldPipeline()
    assert {slot: ask(pipeline, slot) for slot in Slot} == {
        Slot.PRE_DISPATCH: Decision.ALLOW,
        Slot.TOOL_DISPATCH: Decision.ALLOW,
        Slot.EGRESS: Decision.ALLOW,
        Slot.RETRY: Decision.RETRY,
        Slot.BUDGET: Decision.ALLOW,
    }
    assert pipeline.get_events() == []


@pytest.mark.requirement("C-8")
@pytest.mark.parametrize("slot", Slot)
@pytest.mark.parametrize("decision", [Decision.DEGRADE, Decision.RETRY, *REFUSALS])
def test_each_decision_but_allow_leaves_one_event(slot: Slot, decision: Decision) -> None:
    pipeline = with_hooks(slot, Saying(decision))
    assert ask(pipeline, slot) is decision
    (event,) = pipeline.get_events()
    assert event == SafetyEvent(
        event_type=decision.lower() if decision in GOES_ON[slot] else "hook_denied",
        decision=decision,
        reason=f"Saying.{QUESTIONS[slot][0]} returned {decision}",
        hook="Saying",
        request_id="r-1",
        ts=event.ts,
        metadata={"slot": slot, "tool_name": "search"},
    )


def test_the_event_of_a_degrade_carries_the_model() -> None:
    pipeline = ShieldPipeline(Saying(Verdict.degrade(model="small-model")))
    pipeline.before_llm_call(CALL)
    assert pipeline.get_events()[0].metadata["model"] == "small-model"


@pytest.mark.requirement("C-8", "C-19")
@pytest.mark.parametrize("slot", Slot)
def test_a_run_that_asks_leaves_the_same_event_as_a_direct_call(slot: Slot) -> None:
    judged_by_run, direct = with_hooks(slot, Saying(Decision.HALT)), with_hooks(slot, Saying(Decision.HALT))
    judged_by_run.judge(slot, CALL, *ARGUMENTS[slot])
    ask(direct, slot)
    (event,), (other,) = judged_by_run.get_events(), direct.get_events()
    assert event == replace(other, ts=event.ts)


@pytest.mark.requirement("C-19")
def test_a_call_is_described_by_its_request_alone_and_by_all_that_is_known_of_it() -> None:
    assert ShieldPipeline().before_llm_call(ToolCallContext(request_id="r")) is Decision.ALLOW
    assert ToolCallContext("r") == ToolCallContext(
        "r", "", session_id=None, endpoint=None, tokens_in=None, tokens_out=None
    )
    known = ToolCallContext("r", session_id="s", endpoint="https://api.example.org", tokens_in=0, tokens_out=7)
    assert (known.session_id, known.endpoint) == ("s", "https://api.example.org")
    assert (known.tokens_in, known.tokens_out) == (0, 7)


@pytest.mark.requirement("C-19")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session_id", 7),
        ("endpoint", b"x"),
        ("tokens_in", -1),
        ("tokens_in", True),
        ("tokens_out", 1.5),
        ("tokens_out", "7"),
    ],
)
def test_a_description_that_is_none_is_refused_with_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=f"^{field} must be (a |text)"):
        ToolCallContext(**{"request_id": "r", field: value})


@pytest.mark.parametrize("kept", [0, 3])
def test_the_log_keeps_the_latest_events_and_counts_the_others(kept: int) -> None:
    pipeline = ShieldPipeline(Saying(Decision.HALT), max_events=kept)
    for number in range(10):
        pipeline.before_llm_call(ToolCallContext(request_id=f"r-{number}", tool_name="t"))
    assert [event.request_id for event in pipeline.get_events()] == ["r-7", "r-8", "r-9"][:kept]
    assert pipeline.dropped_events == 10 - kept
    pipeline.clear_events()
    assert (pipeline.get_events(), pipeline.dropped_events) == ([], 0)


def test_the_list_of_events_is_the_callers_own() -> None:
    pipeline = ShieldPipeline(Saying(Decision.HALT))
    pipeline.before_llm_call(CALL)
    pipeline.get_events().clear()
    assert len(pipeline.get_events()) == 1


@pytest.mark.reliability
def test_sixty_four_threads_lose_no_event_and_no_count() -> None:
    pipelines = [ShieldPipeline(Saying(Decision.HALT), max_events=1) for _ in range(10)]
    together = threading.Barrier(64)

    def ask_all() -> None:
        for pipeline in pipelines:
            together.wait()
            pipeline.before_llm_call(CALL)

    with giving_way():
        threads = [threading.Thread(target=ask_all) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [len(pipeline.get_events()) + pipeline.dropped_events for pipeline in pipelines] == [64] * 10
