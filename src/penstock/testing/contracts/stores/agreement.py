"""Check that two sets of stores return the same answers to the same random operations.

Operations are drawn from a seed, with few ids, so that they collide, and values that are easily confused. Errors are
compared by their class, because each store has its own messages.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from penstock.hosting.ports import (
    NO_FILTER,
    TRANSITIONS,
    UNTIL_ENDED,
    CostShare,
    HostedEvent,
    SpendingFilter,
    SpendingKey,
)
from penstock.testing.contracts.stores.approvals import ANSWERS, STATES
from penstock.testing.contracts.stores.suite import (
    StoreBundle,
    a_cancel_request,
    a_chat,
    a_message,
    a_payload,
    a_run,
    a_token,
    an_approval,
    an_attachment,
    an_entry,
    an_event,
)

Operation = Callable[[StoreBundle], Awaitable[Any]]

IDS = ("a", "B", "\u00e9", "unknown")
VALUES: tuple[Any, ...] = (None, 1, 1.0, True, "1", "\x00\ud83d", {"b": 1, "a": [2]}, {"a": [2], "b": 1}, float("nan"))

TEXTS = ("one dam and another", "Another River", "dam \u00dcBER dam", "a b \u00e9")


async def agree(one: StoreBundle, other: StoreBundle, *, seed: int, operations: int = 200) -> None:
    """Raise AssertionError for the first operation with different answers, or after which the contents differ."""
    rng = random.Random(seed)
    for stores in (one, other):
        await _begin(stores)
    for number in range(operations):
        now_ms = 1_000 + 10 * number
        name, operation = _random_operation(rng, now_ms)
        first, second = await _answer(one, operation), await _answer(other, operation)
        assert first == second, f"seed {seed}, operation {number}, {name}: {first} and {second}"
        if number % 10 == 9:
            for name, read_contents in _CONTENTS.items():
                first, second = await _answer(one, read_contents), await _answer(other, read_contents)
                assert first == second, f"seed {seed}, after operation {number}, {name}: {first} and {second}"


async def _drop_one(stores: StoreBundle, run_id: str) -> None:
    """Drop the first cancel request of a run."""
    await stores.cancels.drop(run_id, (await stores.cancels.of(run_id))[:1])


async def _begin(stores: StoreBundle) -> None:
    """Add records of every kind, so that the first operations have something to act on."""
    for id in IDS[:3]:
        await stores.runs.add(a_run(id))
        await stores.approvals.ask(an_approval(id, run_id=id, key="k"))
    for id in ("c", "d"):
        await stores.chats.create(a_chat(id))
        await stores.chats.add_messages(id, [a_message("m0"), a_message("m1", "m0", "", state="writing")], now_ms=1)


def _random_operation(rng: random.Random, now_ms: int) -> tuple[str, Operation]:
    drawn = rng.choice(
        (
            _run_operations,
            _run_operations,
            _event_operations,
            _graph_operations,
            _approval_operations,
            _chat_operations,
            _chat_operations,
            _memory_operations,
            _token_operations,
        )
    )
    operations = drawn(rng, now_ms)
    name = rng.choice(sorted(operations))
    return name, operations[name]


def _run_operations(rng: random.Random, now_ms: int) -> Mapping[str, Operation]:
    id, epoch, value = rng.choice(IDS[:3]), rng.randint(0, 4), rng.choice(VALUES)
    status, owner = rng.choice([*TRANSITIONS, "cancelled", "halted"]), rng.choice(("ann", "ann", "bob"))
    run = a_run(id, owner=owner, input=rng.choice(VALUES[:3]), created_ms=rng.randint(0, 2))
    more: dict[str, Any] = {"status": status} if rng.random() < 0.7 else {"output": value}
    worker, lease_ms = rng.choice("vw"), rng.choice((0, 15, 1_000))
    only = rng.choice((None, id))
    shares = [CostShare(rng.choice("ab"), rng.choice("mn"), 1, rng.randint(0, 60)) for _ in range(rng.randint(0, 3))]
    by: Sequence[SpendingKey] = rng.choice(((), ("day", "model"), ("owner", "node"), ("graph_id",)))
    only_of = rng.choice((None, owner))
    return {
        "runs.add": lambda stores: stores.runs.add(run),
        "runs.claim": lambda stores: stores.runs.claim(worker, now_ms=now_ms, lease_ms=lease_ms, run_id=only),
        "runs.claim again": lambda stores: stores.runs.claim(worker, now_ms=now_ms, lease_ms=lease_ms),
        "runs.renew": lambda stores: stores.runs.renew(worker, IDS, now_ms=now_ms, lease_ms=lease_ms),
        "runs.update": lambda stores: stores.runs.update(id, epoch, tokens_in=epoch, **more),
        "runs.update now": lambda stores: _update_now(stores, id, ended_ms=now_ms, **more),
        "runs.update then": lambda stores: _update_now(stores, id, ended_ms=now_ms, status="halted"),
        "runs.requeue": lambda stores: stores.runs.requeue(id, epoch, limits=_limits(epoch)),
        "runs.requeue now": lambda stores: _requeue_now(stores, id, _limits(epoch)),
        "runs.set_usage": lambda stores: stores.runs.set_usage(id, epoch, cost_nanos=now_ms, unresolved_nanos=epoch),
        "runs.end": lambda stores: stores.runs.end(id, status, now_ms=now_ms),
        "runs.remove_ended": lambda stores: stores.runs.remove_ended(now_ms - 50, limit=1),
        "runs.remove": lambda stores: stores.runs.remove(id),
        "runs.list": lambda stores: stores.runs.list(owner=owner, before=only, statuses=[status], limit=epoch),
        "runs.list page": lambda stores: stores.runs.list(before=only, limit=epoch),
        "runs.list bills": lambda stores: stores.runs.list(matching=NO_FILTER._replace(bills="unresolved")),
        "spending.record": lambda stores: stores.spending.record(run._replace(cost_nanos=now_ms), shares),
        "spending.of": lambda stores: stores.spending.of(id),
        "spending.sums": lambda stores: stores.spending.sums(by, SpendingFilter(owner=only_of)),
        "runs.count": lambda stores: stores.runs.count(owner=owner, statuses=[status, "queued"]),
    }


async def _update_now(stores: StoreBundle, id: str, **changes: Any) -> Any:
    run = await stores.runs.get(id)
    return await stores.runs.update(id, 0 if run is None else run.epoch, **changes)


async def _requeue_now(stores: StoreBundle, id: str, limits: Mapping[str, Any] | None) -> Any:
    run = await stores.runs.get(id)
    return await stores.runs.requeue(id, 0 if run is None else run.epoch, limits=limits)


def _limits(number: int) -> dict[str, Any] | None:
    return None if number % 2 else {"max_steps": number}


def _event_operations(rng: random.Random, now_ms: int) -> Mapping[str, Operation]:
    id, epoch, first = rng.choice(IDS), rng.randint(0, 4), rng.randint(0, 6)
    events: Sequence[HostedEvent] = [an_event(first + at, v=rng.choice((1, 1, 2))) for at in range(rng.randint(0, 3))]
    entries = [an_entry(rng.choice("klm"), rng.choice(VALUES)) for _ in range(rng.randint(0, 3))]
    payloads = [a_payload(f"n{rng.randint(1, 3)}", id, now_ms) for _ in range(rng.randint(0, 2))]
    return {
        "events.append": lambda stores: stores.events.append(id, epoch, events),
        "events.append next": lambda stores: _append_next(stores, id, events),
        "events.read": lambda stores: stores.events.read(id, first, epoch),
        "events.read of a type": lambda stores: stores.events.read(id, first, epoch, [event.type for event in events]),
        "events.wait": lambda stores: stores.events.wait(id, first, 0),
        "journal.append": lambda stores: stores.journal.append(id, entries, epoch=epoch),
        "journal.append now": lambda stores: _journal_now(stores, id, entries),
        "journal.load": lambda stores: stores.journal.load(id),
        "journal.forget": lambda stores: stores.journal.forget(id),
        "payloads.put": lambda stores: stores.payloads.put(id, payloads, epoch=epoch),
        "payloads.get": lambda stores: stores.payloads.get(id, "n1"),
        "payloads.remove_before": lambda stores: stores.payloads.remove_before(now_ms - first, limit=2),
    }


async def _append_next(stores: StoreBundle, id: str, events: Sequence[HostedEvent]) -> None:
    run, last = await stores.runs.get(id), await stores.events.last_seq(id)
    numbered = [event._replace(seq=last + at) for at, event in enumerate(events, 1)]
    await stores.events.append(id, 0 if run is None else run.epoch, numbered)


async def _journal_now(stores: StoreBundle, id: str, entries: Sequence[Any]) -> None:
    run = await stores.runs.get(id)
    await stores.journal.append(id, entries, epoch=0 if run is None else run.epoch)


def _graph_operations(rng: random.Random, now_ms: int) -> Mapping[str, Operation]:
    id, version, owner = rng.choice(IDS[:3]), rng.randint(0, 4), rng.choice(("ann", "ann", "bob"))
    document = {"v": rng.choice(VALUES)}
    expected, name = rng.choice((None, version)), rng.choice("GH")
    is_archived = rng.random() < 0.5
    return {
        "graphs.save": lambda stores: stores.graphs.save(id, owner, name, document, now_ms=now_ms),
        "graphs.save expecting": lambda stores: stores.graphs.save(
            id, owner, name, document, now_ms=now_ms, expected_version=expected
        ),
        "graphs.get": lambda stores: stores.graphs.get(id, expected),
        "graphs.head": lambda stores: stores.graphs.head(id, expected),
        "graphs.list": lambda stores: stores.graphs.list(owner=owner, before=id, limit=version),
        "graphs.archive": lambda stores: stores.graphs.archive(id, is_archived=is_archived),
    }


def _approval_operations(rng: random.Random, now_ms: int) -> Mapping[str, Operation]:
    id, run_id, key = rng.choice(IDS[:3]), rng.choice(IDS[:2]), rng.choice("kl")
    state, answer, by = rng.choice((*STATES, *ANSWERS)), rng.choice(VALUES), rng.choice(("ann", "bob"))
    approval = an_approval(id, run_id=run_id, key=key, value=rng.choice(VALUES), asked_ms=now_ms)
    epoch = rng.choice((0, 0, 1, 2))
    owners = {id: rng.choice(("ann", "bob")) for id in IDS}
    until_ms = rng.choice((now_ms, now_ms + 100, now_ms + 1_000, UNTIL_ENDED))
    request = a_cancel_request(run_id, by=by, at_ms=now_ms, until_ms=until_ms, owner=rng.choice(("", "ann", "bob")))
    return {
        "approvals.ask": lambda stores: stores.approvals.ask(approval, epoch=epoch),
        "approvals.answer": lambda stores: stores.approvals.answer(id, state, answer=answer, by=by, now_ms=now_ms),
        "approvals.withdraw": lambda stores: stores.approvals.withdraw(run_id, epoch, now_ms=now_ms),
        "approvals.list": lambda stores: stores.approvals.list(run_id=run_id, states=[state], limit=2),
        "approvals.list behind": lambda stores: stores.approvals.list(before=id, limit=2),
        "approvals.answered": lambda stores: stores.approvals.answered(IDS),
        "approvals.wait": lambda stores: stores.approvals.wait(id, 0),
        "cancels.put": lambda stores: stores.cancels.put(request),
        "cancels.find": lambda stores: stores.cancels.find(owners, now_ms=now_ms),
        "cancels.of": lambda stores: stores.cancels.of(run_id),
        "cancels.lasting": lambda stores: stores.cancels.lasting(limit=2),
        "cancels.drop": lambda stores: stores.cancels.drop(run_id),
        "cancels.drop one": lambda stores: _drop_one(stores, run_id),
        "cancels.prune": lambda stores: stores.cancels.prune(now_ms=now_ms),
    }


def _chat_operations(rng: random.Random, now_ms: int) -> Mapping[str, Operation]:
    chat_id, owner = rng.choice(("c", "c", "d")), rng.choice(("ann", "ann", "bob"))
    message_id, state = f"m{rng.randint(0, 6)}", rng.choice(("writing", "complete"))
    batch = [_some_message(rng) for _ in range(rng.randint(0, 3))]
    content = rng.choice((b"abc", b"xyz"))
    chat = a_chat(chat_id, owner=owner, updated_ms=now_ms, made_by=rng.choice(("", "it")))
    return {
        "chats.create": lambda stores: stores.chats.create(chat),
        "chats.list": lambda stores: stores.chats.list(owner=owner, before=chat_id),
        "chats.rename": lambda stores: stores.chats.rename(chat_id, state, now_ms=now_ms),
        "chats.add_messages": lambda stores: stores.chats.add_messages(chat_id, batch, now_ms=now_ms),
        "chats.add_messages too": lambda stores: stores.chats.add_messages(chat_id, batch[:1], now_ms=now_ms),
        "chats.finish_message": lambda stores: stores.chats.finish_message(
            chat_id, message_id, "done", {"state": state}, now_ms=now_ms
        ),
        "chats.message": lambda stores: stores.chats.message(chat_id, message_id),
        "chats.choose": lambda stores: stores.chats.choose(chat_id, message_id),
        "chats.attach": lambda stores: stores.chats.attach(an_attachment(owner=owner), content),
        "chats.attachment": lambda stores: stores.chats.attachment("f"),
        "chats.detach": lambda stores: stores.chats.detach("f"),
        "chats.mark": lambda stores: stores.chats.mark(state, chat_id, message_id),
        "chats.marked": lambda stores: stores.chats.marked(["writing", "complete"]),
        "chats.remove": lambda stores: stores.chats.remove(chat_id),
        "chats.remove_unused": lambda stores: stores.chats.remove_unused(now_ms - 100, limit=1),
    }


def _memory_operations(rng: random.Random, now_ms: int) -> Mapping[str, Operation]:
    space, key, value = rng.choice("st"), rng.choice((*IDS, "")), rng.choice((*VALUES, *TEXTS, *TEXTS))
    text, limit = rng.choice(("", "?", *TEXTS)), rng.randint(-1, 4)
    return {
        "memories.put": lambda stores: stores.memories.put(space, key, value),
        "memories.get": lambda stores: stores.memories.get(space, key),
        "memories.search": lambda stores: stores.memories.search(space, text, limit),
    }


def _token_operations(rng: random.Random, now_ms: int) -> Mapping[str, Operation]:
    id, before = rng.choice(IDS), rng.choice((None, *IDS))
    ends_ms = rng.choice((None, now_ms - 1, now_ms, now_ms + 50))
    role, kind = rng.choice(("admin", "user", "owner")), rng.choice(("user", "user", "gateway"))
    models = rng.choice((None, ["m"], "m"))
    token = a_token(id, role=role, kind=kind, expires_ms=ends_ms, created_ms=now_ms, models=models)
    keep_admin, is_only = rng.random() < 0.5, rng.random() < 0.5
    return {
        "tokens.add": lambda stores: stores.tokens.add(token, is_only=is_only),
        "tokens.get": lambda stores: stores.tokens.get(id),
        "tokens.list": lambda stores: stores.tokens.list(kinds=[kind], before=before, limit=2),
        "tokens.revoke": lambda stores: stores.tokens.revoke(id, by="ann", now_ms=now_ms, keep_admin=keep_admin),
        "tokens.use": lambda stores: stores.tokens.use(id, now_ms=now_ms * 10_000),
        "tokens.has_admin": lambda stores: stores.tokens.has_admin(),
    }


def _some_message(rng: random.Random) -> Any:
    number = rng.randint(0, 6)
    parent = rng.choice((None, f"m{rng.randint(0, 6)}", f"m{max(0, number - 1)}"))
    attached = rng.choice(([], [], [{"id": "f"}]))
    return a_message(f"m{number}", parent, "", state=rng.choice(("writing", "complete")), attachments=attached)


async def _view(stores: StoreBundle) -> Any:
    messages, in_view = await stores.chats.messages("c")
    parents = {message.id: message.parent_id for message in messages}
    newest = {message.parent_id: message.id for message in messages}
    return list(messages), {
        parent: next((id for id in in_view if parents[id] == parent), newest[parent]) for parent in newest
    }


_CONTENTS: Mapping[str, Operation] = {
    "runs": lambda stores: stores.runs.list(limit=100),
    "events": lambda stores: stores.events.read("a"),
    "journal": lambda stores: stores.journal.load("a"),
    "graphs": lambda stores: stores.graphs.versions("a"),
    "listed graphs": lambda stores: stores.graphs.list(),
    "approvals": lambda stores: stores.approvals.list(),
    "chats": lambda stores: stores.chats.list(),
    "messages": _view,
    "tokens": lambda stores: stores.tokens.list(),
    "memories": lambda stores: stores.memories.search("s", "", 100),
    "found memories": lambda stores: stores.memories.search("s", TEXTS[0], 100),
}


async def _answer(stores: StoreBundle, operation: Operation) -> Any:
    try:
        return _plain(await operation(stores))
    except Exception as error:
        return type(error).__name__


def _plain(answer: Any) -> Any:
    """Normalise an answer for comparison: tuples become lists, and sets and mappings lose their order."""
    if isinstance(answer, Mapping):
        return {key: _plain(value) for key, value in answer.items()}
    if isinstance(answer, (set, frozenset)) or (isinstance(answer, Collection) and not isinstance(answer, Sequence)):
        return sorted(answer)
    if isinstance(answer, Sequence) and not isinstance(answer, (str, bytes)):
        return [_plain(value) for value in answer]
    return answer
