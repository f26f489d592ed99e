"""Notifications between the tasks of one event loop."""

from __future__ import annotations

import asyncio

from penstock.notify import MAX_TOPICS, Notifier


async def test_notify_wakes_the_tasks_that_wait_for_the_topic() -> None:
    notifier = Notifier()
    one, other = (asyncio.create_task(notifier.wait(topic, notifier.version)) for topic in ("a", "b"))
    await asyncio.sleep(0)
    assert notifier.has_waiters
    notifier.notify("a")
    await one
    assert not other.done()
    notifier.notify_all()
    await other
    assert not notifier.has_waiters


async def test_notification_between_reading_and_waiting_is_not_lost() -> None:
    notifier = Notifier()
    seen = notifier.version
    notifier.notify("a")
    await notifier.wait("a", seen)
    assert notifier.version == seen + 1
    waiting = asyncio.create_task(notifier.wait("a", notifier.version))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_wait_ends_after_its_timeout() -> None:
    notifier = Notifier()
    for timeout_s in (0, 0.001):
        await notifier.wait("a", notifier.version, timeout_s)
    assert not notifier.has_waiters


async def test_cancelled_wait_leaves_nothing_behind() -> None:
    notifier = Notifier()
    waiting = asyncio.create_task(notifier.wait("a", notifier.version, 60))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert waiting.cancelled()
    assert not notifier.has_waiters


async def test_after_very_many_topics_an_older_wait_returns_at_once() -> None:
    notifier = Notifier()
    seen = notifier.version
    for number in range(MAX_TOPICS + 1):
        notifier.notify(str(number))
    await notifier.wait("none of them", seen)
    assert len(notifier._last) <= MAX_TOPICS
