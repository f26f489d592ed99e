"""The engine on Temporal: starts and signals workflows, and runs a Temporal worker for each queue of this host.

The client and the workers live on the loop of a thread of their own; see `worker` for why. A host without queues only
submits runs and follows them.

A run is dispatched by starting its workflow, whose id is the run's: starting it again changes nothing. A run that is
resumed signals as well, because its workflow may be about to end. The signal carries the stretch that the run's row
has seen, so that the workflow ignores one that it has acted upon.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, DescribeTaskQueueRequest
from temporalio.client import Client, TLSConfig
from temporalio.common import (
    Priority,
    SearchAttributeKey,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
)
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from penstock.engines.temporal.settings import TemporalSettings
from penstock.engines.temporal.worker import Activities
from penstock.engines.temporal.workflow import DISPATCH, NUDGE, RUN, STATUS, Order, RunWorkflow
from penstock.hosting.engine import EngineHealth, EngineUnavailable, Why, Work, stretch_of
from penstock.hosting.ports import ENDED, RunRecord
from penstock.runtime.durable.loop_thread import LoopThread

T = TypeVar("T")

logger = logging.getLogger("penstock.engines")

DEFAULT_QUEUE = "default"
CALL_S = 5.0
"""Timeout of a call to Temporal."""
CONNECT_S = 30.0
POLLS = 2
CLOSING_S = 5.0
"""Time that workers have to report the end of their last activities."""
CLOSED = ("close_notify", "CertificateRequired", "broken pipe", "BrokenPipe", "ConnectionReset", "onnection reset")
"""Parts of the errors of a connection, by moment, if the server asks for a certificate and gets none."""
GRAPH, OWNER = SearchAttributeKey.for_keyword("PenstockGraph"), SearchAttributeKey.for_keyword("PenstockOwner")
ATTRIBUTES = (GRAPH, OWNER, STATUS)
SANDBOX = SandboxedWorkflowRunner(restrictions=SandboxRestrictions.default.with_passthrough_modules("penstock"))
"""Workflows share our modules: importing them anew for each would cost half a second."""


def workflow_id(database: str, run_id: str) -> str:
    """Return the id of the workflow of a run: clients may choose run ids, and use the same in two databases."""
    return f"penstock/{database}/{run_id}"


def task_queue(queue: str) -> str:
    """Return the name of the task queue of a queue."""
    return f"penstock/{queue}"


class TemporalEngine:
    """An `Engine` on a Temporal server."""

    def __init__(
        self,
        settings: TemporalSettings,
        *,
        queues: Sequence[str] = (),
        queue: str = DEFAULT_QUEUE,
        heartbeat_s: float = 15,
    ) -> None:
        """Work on the runs of `queues`, on none if it is empty; submitted runs go to `queue` unless they name one.

        A worker that is silent for `heartbeat_s` counts as dead.
        """
        self.queue: str | None = queue
        self._settings = settings
        self._queues = tuple(dict.fromkeys(queues))
        self._usual_queue = queue
        self._heartbeat_s = heartbeat_s
        self._thread: LoopThread | None = None
        self._client: Client | None = None
        self._database = ""
        self._shown: frozenset[str] = frozenset()
        """Names of the search attributes that the server knows."""
        self._workers: list[Worker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: list[asyncio.Task[None]] = []

    # The engine.

    async def start(self, work: Work) -> None:
        """Connect, and start a worker for each queue."""
        self._database = work.database
        self._thread = LoopThread("penstock temporal")
        try:
            host_loop = asyncio.get_running_loop()
            await self._on_thread(self._start(work, host_loop), CONNECT_S)
        except BaseException:
            await self.close()
            raise

    async def drain(self) -> None:
        """Take no further runs; the activities in progress end with their runs."""
        if self._thread is not None:
            await self._thread.result(self._stop())

    async def close(self) -> None:
        """Wait for the workers to report their last results, then end the thread."""
        thread = self._thread
        if thread is not None:
            await thread.result(self._stopped())
            self._thread = self._client = None
            await asyncio.to_thread(thread.close)

    async def dispatch(self, run: RunRecord) -> None:
        """Start the workflow of a run; for a resumed run, signal an existing workflow that the run is queued again."""
        await self._on_thread(self._dispatch(run))

    async def nudge(self, run: RunRecord, why: Why) -> None:
        """Signal the workflow of a run; an answer starts it, if the server has lost it."""
        await self._on_thread(self._nudge(run))

    async def health(self) -> EngineHealth:
        """Ask whether the namespace and workers for its usual queue are there."""
        try:
            return await self._on_thread(self._health())
        except EngineUnavailable as error:
            return EngineHealth(is_ok=False, found=str(error))

    async def examine(self) -> tuple[EngineHealth, Sequence[str]]:
        """Connect, ask for the health, and disconnect; also returns which search attributes are not registered."""
        self._thread = LoopThread("penstock temporal")
        try:
            await self._on_thread(self._connect(), CONNECT_S)
            return await self.health(), [key.name for key in ATTRIBUTES if key.name not in self._shown]
        finally:
            await self.close()

    # On the thread.

    async def _on_thread(self, call: Coroutine[Any, Any, T], timeout_s: float = CALL_S) -> T:
        """Await a call on the engine's thread; raise a failure as EngineUnavailable, with a suggestion."""
        thread = self._thread
        if thread is None:
            call.close()
            raise EngineUnavailable(f"the connection to Temporal at {self._settings.url} is closed")
        try:
            return await thread.result(asyncio.wait_for(call, timeout_s))
        except TimeoutError:
            raise EngineUnavailable(self._away(f"no response within {timeout_s:g} s")) from None
        except RPCError as error:
            raise EngineUnavailable(self._explained(error)) from None
        except RuntimeError as error:  # raised by a connection that cannot be opened
            raise EngineUnavailable(self._away(_cause_of(str(error), self._settings))) from None

    def _away(self, why: str) -> str:
        return f"Temporal cannot be reached at {self._settings.url} ({why}); check that it runs, and its address"

    def _explained(self, error: RPCError) -> str:
        url, namespace = self._settings.url, self._settings.namespace
        match error.status:
            case RPCStatusCode.NOT_FOUND:
                create = f"temporal operator namespace create --namespace {namespace}"
                return f"Temporal at {url} has no namespace {namespace!r}; create it: {create}"
            case RPCStatusCode.UNAUTHENTICATED | RPCStatusCode.PERMISSION_DENIED:
                return f"Temporal at {url} refuses this client ({error.message}); check PENSTOCK_TEMPORAL_API_KEY"
            case _:
                return self._away(error.message)

    async def _connect(self) -> Client:
        client = await connect(self._settings)
        await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=client.namespace))
        self._shown = await known_attributes(client)
        self._client = client
        return client

    async def _start(self, work: Work, host_loop: asyncio.AbstractEventLoop) -> None:
        client = await self._connect()
        for queue in self._queues:
            worker = Worker(
                client,
                task_queue=task_queue(queue),
                workflows=[RunWorkflow],
                activities=Activities(work, host_loop, queue).all,
                workflow_runner=SANDBOX,
                identity=work.worker,
                max_concurrent_activities=work.slots,
                max_concurrent_activity_task_polls=POLLS,  # a frozen worker swallows a task for each
                max_concurrent_workflow_task_polls=POLLS,
                max_heartbeat_throttle_interval=timedelta(seconds=self._heartbeat_s / 3),
                default_heartbeat_throttle_interval=timedelta(seconds=self._heartbeat_s / 3),
                graceful_shutdown_timeout=timedelta(days=1),  # the host parks its runs, which ends the activities
            )
            self._workers.append(worker)
            self._tasks.append(asyncio.create_task(self._run(worker), name=f"temporal worker of {queue}"))

    async def _run(self, worker: Worker) -> None:
        try:
            await worker.run()
        except Exception:
            logger.exception("the Temporal worker of task queue %r has failed", worker.task_queue)

    async def _stop(self) -> None:
        self._stopping = [asyncio.create_task(worker.shutdown()) for worker in self._workers]
        self._workers = []
        await asyncio.sleep(0)

    async def _stopped(self) -> None:
        await self._stop()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSING_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=CLOSING_S)
        self._tasks = []

    def _connected(self) -> Client:
        if self._client is None:
            raise EngineUnavailable(f"the connection to Temporal at {self._settings.url} is not open")
        return self._client

    async def _dispatch(self, run: RunRecord) -> None:
        client, after = self._connected(), stretch_of(run.fence)
        shown = {GRAPH: run.graph_id, OWNER: run.owner, STATUS: "queued"}
        pairs = [SearchAttributePair(key, value) for key, value in shown.items() if key.name in self._shown]
        is_first = not run.fence  # the workflow of such a run cannot be about to end
        await client.start_workflow(
            RUN,
            Order(run.id, self._database, after, self._heartbeat_s, STATUS.name in self._shown),
            id=workflow_id(self._database, run.id),
            task_queue=task_queue(run.queue or self._usual_queue),
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            start_signal=None if is_first else DISPATCH,
            start_signal_args=[] if is_first else [after],
            search_attributes=TypedSearchAttributes(pairs),
            priority=Priority(priority_key=run.priority),
            rpc_timeout=timedelta(seconds=CALL_S),
        )

    async def _nudge(self, run: RunRecord) -> None:
        handle = self._connected().get_workflow_handle(workflow_id(self._database, run.id))
        try:
            await handle.signal(NUDGE, rpc_timeout=timedelta(seconds=CALL_S))
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            if run.status not in ENDED:
                await self._dispatch(run)

    async def _health(self) -> EngineHealth:
        client = self._connected()
        await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=client.namespace))
        queues = self._queues or (self._usual_queue,)
        idle = [queue for queue in queues if not await has_workers(client, queue)]
        if idle:
            found = f"no worker takes runs from {', '.join(idle)}; start penstock worker"
            return EngineHealth(is_ok=False, found=found)
        return EngineHealth(is_ok=True, found=self._settings.url)


def _cause_of(error: str, settings: TemporalSettings) -> str:
    """Return the cause in an error message of the connection's own library, without the error types around it."""
    if "InvalidContentType" in error:
        return "its response is not TLS; without TLS it is temporal://"
    if "UnknownIssuer" in error:
        return "its certificate is of an authority that is not trusted here; name it with PENSTOCK_TEMPORAL_CA"
    if "NotValidForName" in error:
        return "its certificate has another name than its host; name the one in it with PENSTOCK_TEMPORAL_SERVER_NAME"
    may_need_certificate = settings.has_tls and settings.certificate is None
    if may_need_certificate and any(sign in error for sign in CLOSED):
        return "it closed the connection; does it ask for PENSTOCK_TEMPORAL_CERT?"
    found = re.findall(r'(?:message|error): "([^"]+)"', error)
    return found[-1] if found else error


async def connect(settings: TemporalSettings) -> Client:
    """Connect to a server; RuntimeError or RPCError if that is not possible."""
    tls: TLSConfig | bool = settings.has_tls
    if settings.has_tls:
        tls = TLSConfig(
            server_root_ca_cert=settings.ca,
            domain=settings.server_name,
            client_cert=settings.certificate,
            client_private_key=settings.private_key,
        )
    return await Client.connect(
        settings.target, namespace=settings.namespace, tls=tls, api_key=settings.api_key or None
    )


async def known_attributes(client: Client) -> frozenset[str]:
    """Return which of our search attributes the namespace has; none if it does not tell."""
    try:
        found = await client.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=client.namespace)
        )
    except RPCError:  # this client may not ask
        return frozenset()
    return frozenset(key.name for key in ATTRIBUTES if key.name in found.custom_attributes)


async def has_workers(client: Client, queue: str) -> bool:
    """Whether a worker has polled a queue recently."""
    found = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=client.namespace,
            task_queue=TaskQueue(name=task_queue(queue)),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        )
    )
    return bool(found.pollers)
