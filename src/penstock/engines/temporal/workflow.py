"""The workflow of a run: call its work again until the run has ended.

It knows the run's id and nothing else of it. It runs inside Temporal's sandbox and is replayed from its history, so it
imports nothing of Penstock, and a change of its behaviour needs `workflow.patched`; recorded histories are replayed by
the tests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

from temporalio import workflow
from temporalio.common import RetryPolicy, SearchAttributeKey
from temporalio.exceptions import ActivityError, is_cancelled_exception

RUN, WORK, CANCEL = "penstock.run", "penstock.work", "penstock.cancel"
"""Names of the workflow and of its activities."""
DISPATCH, NUDGE = "dispatch", "nudge"
"""Names of its signals."""
MAX_WAITS = 50
"""Number of stretches after which the workflow continues as a new one, so that its history stays short."""
LONGEST = timedelta(days=365)
# The pause grows slowly: a stretch may be given to a frozen worker several times, until its connections are closed.
RETRIES = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=1.2, maximum_interval=timedelta(seconds=30)
)
STATUS = SearchAttributeKey.for_keyword("PenstockStatus")


@dataclass
class Order:
    """The input of the workflow."""

    run_id: str
    database: str
    """Id of the database that has the run."""
    stretch: int = 0
    """Number of stretches so far."""
    heartbeat_s: float = 15
    """Time after which a silent worker has lost the run."""
    shows_status: bool = False
    """Whether the server knows the search attribute of the status."""


@dataclass
class Stretch:
    """The input of an activity."""

    run_id: str
    database: str
    stretch: int


@dataclass
class Result:
    """The result of a stretch."""

    kind: Literal["ended", "waiting", "leaving"]
    status: str = ""
    until_ms: int | None = None


@workflow.defn(name=RUN)
class RunWorkflow:
    """One run."""

    @workflow.init
    def __init__(self, order: Order) -> None:
        self._order = order
        self._stretch = order.stretch
        self._is_nudged = False
        self._after = 0
        """Highest stretch that a dispatch of the run followed."""

    @workflow.signal(name=DISPATCH)
    def dispatch(self, after: int) -> None:
        """Work on the run again, if it was queued after this stretch: any later one has done so already."""
        self._after = max(self._after, after)

    @workflow.signal(name=NUDGE)
    def nudge(self) -> None:
        """Stop waiting: the stores have an answer or a cancel request."""
        self._is_nudged = True

    @workflow.run
    async def run(self, order: Order) -> str:
        try:
            return await self._worked()
        except (asyncio.CancelledError, ActivityError) as error:
            if not is_cancelled_exception(error):
                raise
            await self._call(CANCEL)  # cancelled with Temporal's tools: so is the run
            self._show("cancelled")
            raise

    async def _worked(self) -> str:
        while True:
            self._stretch += 1
            self._is_nudged = False
            result = await self._call(WORK)
            if result.kind == "ended" and self._after < self._stretch:
                self._show(result.status)
                return result.status
            if result.kind == "waiting":
                self._show("waiting" if result.until_ms is None else "queued")
                await self._waited(result.until_ms)
            if self._stretch - self._order.stretch >= MAX_WAITS or workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(replace(self._order, stretch=self._stretch))

    async def _call(self, activity: str) -> Result:
        result: Result = await workflow.execute_activity(
            activity,
            Stretch(self._order.run_id, self._order.database, self._stretch),
            result_type=Result,
            start_to_close_timeout=LONGEST,
            heartbeat_timeout=timedelta(seconds=self._order.heartbeat_s),
            retry_policy=RETRIES,
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
        return result

    async def _waited(self, until_ms: int | None) -> None:
        """Wait until the run is dispatched or nudged, or until that time."""
        timeout = None
        if until_ms is not None:
            timeout = timedelta(milliseconds=max(1, until_ms - workflow.now().timestamp() * 1_000))
        try:
            await workflow.wait_condition(lambda: self._is_nudged or self._after >= self._stretch, timeout=timeout)
        except TimeoutError:
            return

    def _show(self, status: str) -> None:
        if self._order.shows_status and status:
            workflow.upsert_search_attributes([STATUS.value_set(status)])
