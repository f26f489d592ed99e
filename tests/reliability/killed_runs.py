"""Runs and chats whose processes are killed, and what must be true of them afterwards, judged by their log."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.hosting.event_data import STATUS_OF
from penstock.ids import new_run_id
from tests.reliability.crash_driver import complete_lines
from tests.reliability.fork_server import ForkServer

MAX_EPOCHS = 60
CEILING_NANOS = 5_000_000_000
LOOK_NANOS = 1_000
"""What a call of the tool `look` costs."""
SAME_FACTS = ("status", "output", "entries", "approvals")
"""Facts about a run that no kill may change."""
RESTART_EVENTS = ("run.granted", "run.queued")
ANSWER_STATES: dict[str, str] = {"cancel": "partial", "early": "partial"}
"""The state of the answer by story; "complete" for the others."""


class KilledRun:
    """A database, a log beside it, and one run in them; each process that works on it is one epoch.

    If `temporal` names a server, it dispatches the run, through a queue of its own.
    """

    def __init__(self, server: ForkServer, url: str, log: Path, temporal: str | None = None) -> None:
        self._server = server
        self._where = {"url": url} if temporal is None else {"url": url, "temporal": temporal, "queue": new_run_id()}
        self.log = log
        self.epoch = 0

    def work(self, **command: Any) -> int:
        """Have one more process take over the run; its exit status."""
        self.epoch += 1
        return self._server.run(**self._where, log=str(self.log), epoch=self.epoch, **command)

    def finish(self) -> None:
        """Have processes take over the run until one completes it."""
        while (status := self.work()) != 0:
            assert status == -signal.SIGKILL
            assert self.epoch < MAX_EPOCHS

    def lines(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in complete_lines(self.log.read_bytes()).splitlines()]

    def outcome(self) -> dict[str, Any]:
        """What the last process reported; empty if none has completed the run."""
        return next((line for line in reversed(self.lines()) if "done" in line), {})

    def violations(self, expected: dict[str, Any]) -> list[str]:
        """What is wrong, compared with the outcome of a run whose process was not killed."""
        found: list[str] = []
        recorded: set[str] = set()
        ran: set[tuple[int, str]] = set()
        for line in self.lines():
            if "recorded" in line:
                if not recorded <= set(line["recorded"]):
                    found.append(f"epoch {line['epoch']} has lost {recorded - set(line['recorded'])}")
                recorded = set(line["recorded"])
            elif "key" in line:
                if line["key"] in recorded:
                    found.append(f"{line['key']} was recorded and ran again in epoch {line['epoch']}")
                if (line["epoch"], line["key"]) in ran:
                    found.append(f"{line['key']} ran twice in epoch {line['epoch']}")
                ran.add((line["epoch"], line["key"]))
        ends = [line for line in self.lines() if "done" in line]
        for end, name in itertools.product(ends, ("done", "state", "entries", "spent_in_process")):
            if end[name] != expected[name]:
                found.append(f"{name} is {end[name]!r}, and {expected[name]!r} without a kill")
        last = self.outcome()
        if last["committed"] < self.invoice:
            found.append(f"the ledger has {last['committed']}, and {self.invoice} were billed")
        if last["held"]:
            found.append(f"{last['held']} are still held")
        return found

    @property
    def invoice(self) -> int:
        return sum(line.get("billed", 0) for line in self.lines())


class KilledChat(KilledRun):
    """A database with one chat in it; each process is a worker of its run and a client of the chat."""

    def __init__(
        self, server: ForkServer, url: str, log: Path, story: str = "chat", temporal: str | None = None
    ) -> None:
        super().__init__(server, url, log, temporal)
        self.story = story

    def work(self, **command: Any) -> int:
        return super().work(story=self.story, **command)

    def start(self, server: ForkServer, **command: Any) -> int:
        """Start a process of another server and wait until it reports that it stops; its process id."""
        self.epoch += 1
        server.start(**self._where, log=str(self.log), epoch=self.epoch, story=self.story, **command)
        while not (found := [line["stops"] for line in self.lines() if "stops" in line]):
            time.sleep(0.01)
        return int(found[0])

    def outcome(self) -> dict[str, dict[str, Any]]:
        """The facts that the last process reported, by run."""
        return {line["left"]: line for line in self.lines() if "left" in line}

    def violations(self, expected: dict[str, Any]) -> list[str]:
        runs = self.outcome()
        found = self._repetitions()
        if runs.keys() != expected.keys():
            found.append(f"there are runs {sorted(runs)}, and {sorted(expected)} without a kill")
        for run_id, run in runs.items():
            found += self._run_violations(run, expected[run_id])
        return found

    def _repetitions(self) -> list[str]:
        """What was recorded and is lost, or ran again; what ran more often than its run was claimed.

        Each process claims the run, and claims it again if it has lost the lease.
        """
        found: list[str] = []
        recorded: dict[str, set[str]] = {}
        ran: Counter[str] = Counter()
        for line in self.lines():
            if "recorded" in line:
                before, now = recorded.get(line["run"], set()), set(line["recorded"])
                if not before <= now:
                    found.append(f"process {line['epoch']} has lost {before - now}")
                recorded[line["run"]] = now
            elif "key" in line:
                ran[line["key"]] += 1
                if any(line["key"] in keys for keys in recorded.values()):
                    found.append(f"{line['key']} was recorded and ran again in process {line['epoch']}")
        claims = {run_id: run["claims"] for run_id, run in self.outcome().items()}
        too_often = [(key, times) for key, times in ran.items() if times > claims.get(key.split("/")[0], 0)]
        return [*found, *(f"{key} ran {times} times; the claims were {claims}" for key, times in too_often)]

    def _run_violations(self, run: dict[str, Any], expected: dict[str, Any]) -> list[str]:
        names = [name for name in SAME_FACTS if run[name] != expected[name]]
        found = [f"{name} is {run[name]!r}, and {expected[name]!r} without a kill" for name in names]
        if run["worker"] is not None or run["held"]:
            found.append(f"the run has ended; its worker is {run['worker']!r} and {run['held']} are still held")
        found += event_violations(run) + _answer_violations(run, expected, ANSWER_STATES.get(self.story, "complete"))
        if self.story != "unpriced":
            found += self._cost_violations(run, expected)
        return found + self.bill_violations(run)

    def _cost_violations(self, run: dict[str, Any], expected: dict[str, Any]) -> list[str]:
        """What is charged although it was not billed, and what is unresolved although its bill is known.

        A call that was recorded costs what it would without a kill. Calls of a killed process that the next one made
        again were billed more than once: each is either charged, or unresolved.
        """
        bills = self._bills(run)
        repeated = sum(billed for _, billed in bills) - sum(dict(bills).values())
        spent, unresolved = run["account"][:2]
        extra = spent - expected["account"][0]
        found = []
        if not 0 <= extra <= repeated <= extra + unresolved:
            found.append(
                f"{repeated} were billed for repeated calls; {extra} are charged for them, {unresolved} unresolved"
            )
        left = [line for line in self.lines() if line.get("left") == run["left"]]
        survived = max(line["claims_before"] for line in left)
        ended = [bill for bill in run["unresolved_bills"] if int(bill.split("/")[1].partition("-")[0]) > survived]
        if ended and self.story != "grant":  # there, the limit cuts calls that are under way
            found.append(f"{ended} are unresolved, and the process that made these calls was not killed")
        return found

    def _bills(self, run: dict[str, Any]) -> list[tuple[str, int]]:
        """The invoice for a run: each call that left its process, with its cost."""
        calls = [line for line in self.lines() if line.get("key", "").startswith(f"{run['left']}/")]
        return [(line["key"], line.get("billed", LOOK_NANOS if "-look:" in line["key"] else 0)) for line in calls]

    def bill_violations(self, run: dict[str, Any]) -> list[str]:
        """Where invoice, ledger, record and last event of the run disagree."""
        spent, unresolved, *_ = run["account"]
        billed = 0 if self.story == "unpriced" else sum(billed for _, billed in self._bills(run))
        found = []
        if not billed <= spent + unresolved <= CEILING_NANOS:
            found.append(f"{billed} were billed; the ledger has {spent} and {unresolved} unresolved")
        if run["record"] != run["account"]:
            found.append(f"the record has {run['record']}, the ledger {run['account']}")
        unknown = run["api_calls"] if self.story == "unpriced" else 0
        if not run["unknown_costs"] == run["last"].get("unknown_costs", 0) == unknown:
            found.append(f"{unknown} calls have no price; the record has {run['unknown_costs']}")
        in_event = [round(run["last"].get(name, 0) * 1e9) for name in ("cost_usd", "unresolved_usd")]
        if in_event != run["record"][:2]:
            found.append(f"the last event has {in_event}, the record {run['record']}")
        return found


def event_violations(run: dict[str, Any]) -> list[str]:
    """Sequence numbers have no gaps; after an end nothing follows but a restart, which is published once."""
    found = [] if run["seqs"] == [*range(1, len(run["seqs"]) + 1)] else [f"there are gaps in {run['seqs']}"]
    types = run["event_types"]
    ends = [at for at, type in enumerate(types) if type in STATUS_OF]
    if [at for at in ends if at + 1 < len(types) and types[at + 1] not in RESTART_EVENTS] or ends[-1:] != [
        len(types) - 1
    ]:
        found.append(f"events follow the end: {types}")
    if any(one in RESTART_EVENTS and after in RESTART_EVENTS for one, after in pairwise(types)):
        found.append(f"the restart was published twice: {types}")
    if STATUS_OF[types[-1]] != run["status"]:
        found.append(f"the run is {run['status']}, and its last event is {types[-1]}")
    return found


def _answer_violations(run: dict[str, Any], expected: dict[str, Any], state: str) -> list[str]:
    """One question and one answer, as without a kill; an answer that a limit halted may be beside it."""
    messages = [message for message in run["conversation"] if message[2] != "halted"]
    wanted = [message for message in expected["conversation"] if message[2] != "halted"]
    if messages != wanted or [message[2] for message in messages if message[0] == "assistant"] != [state]:
        return [f"the conversation is {run['conversation']!r}, and {expected['conversation']!r} without a kill"]
    return []
