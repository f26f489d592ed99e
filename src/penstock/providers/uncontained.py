"""Model requests that belong to no scope while a scope is open.

They come from code that no scope reaches: a thread that was started without `threading`, a pool of another library, a
context that was made empty. The same holds for requests sent where nothing is contained: around the transports of a
library, or over a WebSocket. They are not limited, so they are reported: a warning, a count on every run with an open
scope, and a line in `explain()`. A strict run refuses them. A run that adopts is charged for those that belong to no
scope, if it is the only one with an open scope and the process hosts no runs for others.

A process that is forked inside a scope has copies of its parent's runs, which limit nothing: its requests are reported
the same way, until it opens a scope of its own.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping

from penstock.errors import PenstockError
from penstock.providers.http.exchange import Terms, refuse_after_stop
from penstock.providers.http.forms import form_of, is_model_socket
from penstock.providers.http.request import COMMON_PATHS, parse_request
from penstock.providers.reading.families import in_the_families
from penstock.runtime.run import Run, open_hosts

NO_RUN = "belongs to no run"
AROUND = "is sent around the libraries that are contained"
OVER_A_SOCKET = "is sent over a WebSocket"
WHAT_TO_DO = "make it inside `with contained(run):`, in a thread started there, or through contained_client(run)"
ADVICE = {
    NO_RUN: WHAT_TO_DO,
    AROUND: "send it with a transport of httpx2 or httpx, or with another HTTP library",
    OVER_A_SOCKET: "send it as a plain HTTP request",
}

is_watching = False
"""Whether a scope is open in this process, or was when it was forked."""

_DEFAULT_TYPES = ("form-urlencoded", "octet-stream", "text/plain")
"""Content types that libraries use for a body of unknown type."""

_lock = threading.RLock()  # the garbage collector may close a block in the middle of any of this
_open: dict[Run, list[Terms]] = {}
"""The runs with open scopes, and the terms of those scopes."""
_parents: dict[Run, set[str]] = {}
"""The runs that had open scopes when this process was forked, and the hosts that were reported."""


class UncontainedRequest(PenstockError):
    """A model request that belongs to no run was refused, because a strict run is open."""

    def __init__(self, host: str, run_id: str, why: str = NO_RUN) -> None:
        self.host = host
        self.run_id = run_id
        super().__init__(f"the model request to {host} {why}, and the open run {run_id} is strict: {ADVICE[why]}")


def opened(terms: Terms) -> None:
    """Report requests outside of any scope from now on, to the run of these terms among others."""
    global is_watching
    with _lock:
        _open.setdefault(terms.context._run, []).append(terms)
        is_watching = True


def closed(terms: Terms) -> None:
    """Undo one `opened`."""
    global is_watching
    run = terms.context._run
    with _lock:
        # Entered in a parent process and left in this one: there is nothing to undo here.
        if terms in (scopes := _open.get(run, [])):
            scopes.remove(terms)
        if not scopes:
            _open.pop(run, None)
        is_watching = bool(_open or _parents)


def open_terms() -> list[Terms]:
    """Return the terms of the newest scope of each run with open scopes that has not ended."""
    with _lock:
        return [scopes[-1] for run, scopes in _open.items() if not run.graph.closed]


def judge(method: str, host: str, path: str, headers: Mapping[str, str], content: bytes | None = None) -> Terms | None:
    """Return the terms of the run that adopts the request; None if it is sent unchanged. Raises if it is refused.

    `content` is its body, if that is known.
    """
    if not _is_model_request(method, host, path, headers, content):
        return None
    terms = open_terms()
    runs = [each.context._run for each in terms]
    if len(runs) == 1 and runs[0].settings.adopt and not open_hosts:
        return terms[0]
    _refuse_or_report(host, runs, NO_RUN)
    return None


def pass_by(method: str, host: str, path: str, headers: Mapping[str, str], own: Terms | None = None) -> None:
    """Report a request that cannot be contained where it is made; raise if it is refused.

    `own` are the terms of the run to which it would belong.
    """
    if _is_model_request(method, host, path, headers):
        _refuse_or_report(host, _concerned(host, own), AROUND)


def open_socket(host: str, path: str, own: Terms | None = None) -> None:
    """Report a WebSocket that is about to be opened, if model requests are sent over it; raise if it is refused.

    `own` are the terms of the run to which the requests would belong.
    """
    if is_model_socket(host, path):
        _refuse_or_report(host, _concerned(host, own), OVER_A_SOCKET)


def _concerned(host: str, own: Terms | None) -> list[Run]:
    """Return the runs to which a request that cannot be contained is reported: its own first, if it has one.

    Raises if its own run has ended or was stopped: a report would come too late.
    """
    if own is None:
        return [terms.context._run for terms in open_terms()]
    refuse_after_stop(own, f"a model request to {host}")
    run = own.context._run
    return [run, *(other for terms in open_terms() if (other := terms.context._run) is not run)]


def _refuse_or_report(host: str, runs: list[Run], why: str) -> None:
    for run in runs or _parents:
        if run.settings.strict:
            raise in_the_families(UncontainedRequest(host, run.id, why))
    if runs:
        _report(host, runs, why)
    else:
        _report_forked(host)


def _is_model_request(
    method: str, host: str, path: str, headers: Mapping[str, str], content: bytes | None = None
) -> bool:
    """Whether this is a model request, as far as its headers and its body show: other APIs have such paths too."""
    form = form_of(method, host, path, headers)
    if form is None or form.is_provider:
        return form is not None
    if content is not None:
        return parse_request(form, headers, content) is not None
    content_type = headers.get("content-type", "json")
    if any(default in content_type for default in _DEFAULT_TYPES):
        return form.api not in COMMON_PATHS
    return "json" in content_type or "multipart" in content_type


def report_if_model(method: str, host: str, path: str) -> None:
    """Report a request that bypassed the hooks to the runs with open scopes, if it is a model request."""
    runs = [terms.context._run for terms in open_terms()]
    if runs and form_of(method, host, path) is not None:
        _report(host, runs, AROUND)


def _report(host: str, runs: list[Run], why: str) -> None:
    new = [run.id for run in runs if run.record_uncontained(host)]
    if new:
        facts = f"a model request to {host} {why} and is not limited, while {', '.join(new)} is open"
        warnings.warn(f"{facts}: {ADVICE[why]}", RuntimeWarning, stacklevel=2)


def _report_forked(host: str) -> None:
    with _lock:
        new = [run.id for run, hosts in _parents.items() if host not in hosts]
        for hosts in _parents.values():
            hosts.add(host)
    if new:
        facts = f"a model request to {host} is not limited: this process was forked inside a block of {', '.join(new)}"
        warnings.warn(f"{facts}; open a block of its own in each process", RuntimeWarning, stacklevel=2)


def _forked() -> None:
    global _lock, _open, _parents, is_watching
    _lock = threading.RLock()  # a thread that does not exist in this process may have held it
    _parents = _parents | {run: set() for run in _open if not run.graph.closed}
    _open = {}
    is_watching = bool(_parents)


os.register_at_fork(after_in_child=_forked)
