"""Client connection to a server: requests with responses, and event streams.

Errors are reported in one sentence with what to do about them. A broken stream is resumed where it broke, for as long
as a graceful server restart takes; no event is lost or repeated, because the server numbers its events.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import takewhile
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2

from penstock.cli.exits import Failed, Lost, NotFound, Refused
from penstock.cli.options import URL
from penstock.cli.render.events import FINAL, RunEvent
from penstock.cli.render.screen import print_error, printable
from penstock.ids import new_run_id

CONNECT_S = 5.0
ANSWER_S = 60.0
SILENCE_S = 60.0
"""Read timeout of a stream; servers send a keep-alive comment every 15 s, so longer silence means it broke."""
ATTEMPTS = 3
"""Attempts for idempotent requests when the connection breaks."""
PAUSES_S = (0.1, 0.2, 0.5, 1.0, *[2.0] * 30)
"""Pauses before each attempt to resume a stream, as long as no new event comes. Their sum outlasts a server restart:
draining runs, stopping, starting, and waiting for the leases of the previous server: 10, 5, 5 and 15 s."""
UNREPORTED_BREAKS = 4
"""Number of consecutive breaks that are not reported."""
API_PATHS = ("/v1", "/mcp", "/api")
"""Paths that users add to the server address by mistake, because some clients require them."""
PAGE = 500
"""Events requested per page, which is the server's maximum."""
MAX_LISTED = 10
PARKED = "run.parked"
NOTHING_MORE = 204
"""Status code of the server when the client has already seen the final event of a run."""


class Connection:
    """A connection to one server as one user; a context manager."""

    def __init__(self, url: str = URL, token: str | None = None, *, timeout_s: float = ANSWER_S) -> None:
        self.url = _checked(url)
        self.at = _at(self.url)
        """`--url` option to append to suggested commands; empty if they would use this server anyway."""
        headers = {"accept": "application/json"}
        if token is not None:
            headers["authorization"] = f"Bearer {_header(token)}"
        self._client = httpx2.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx2.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            follow_redirects=False,
            trust_env=False,  # a private server is not behind the web proxy of the environment
        )

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def get(self, path: str, **query: Any) -> Any:
        """Send a GET request and return the decoded response."""
        params = {name: value for name, value in query.items() if value is not None}
        return self._request("GET", path, ATTEMPTS, params=params)

    def post(self, path: str, body: Any = None, *, idempotent: bool = False) -> Any:
        """Send a POST request and return the decoded response.

        If `idempotent`, the body has the id of the new object, and the request is repeated if the connection breaks.
        """
        # ASCII with escapes, so that a lone surrogate reaches the server, which reports the problem.
        content = json.dumps({} if body is None else body).encode("ascii")
        headers = {"content-type": "application/json"}
        return self._request("POST", path, ATTEMPTS if idempotent else 1, content=content, headers=headers)

    def find_run(self, given: str) -> str:
        """Return the id of the run that `given` names: its id, or a part of its id that no other run has.

        A part is the beginning or the end of the id; the newest runs that you may see are searched. Raises Failed if
        there is no such run, or if there are several.
        """
        if len(given) == len(new_run_id()):
            return given
        try:
            self.get(f"/api/runs/{escaped(given)}")
        except NotFound as missing:
            newest = (str(run["id"]) for run in self.get("/api/runs", limit=PAGE)["runs"])
            found = [id for id in newest if id.startswith(given) or id.endswith(given)]
            if not found:
                raise NotFound(f"{missing}; none of the newest runs begins or ends with {given!r}") from None
            if len(found) > 1:
                listed = ", ".join(found[:MAX_LISTED])
                raise Failed(f"{given!r} matches {len(found)} ids; give more characters of one: {listed}") from None
            return found[0]
        return given

    def events(
        self,
        run_id: str,
        after: int = 0,
        *,
        wanted: Callable[[], bool] = lambda: True,
        notice: Callable[[str], None] = print_error,
    ) -> Generator[RunEvent, None, None]:
        """Yield the events of a run after `after` as they come, until it has ended; waits while the run is parked.

        `wanted` is called for every line from the server, keep-alive comments included; the stream ends if it is false.
        Problems that delay events go to `notice`; raises Lost when the server has not answered for too long.
        """
        last, is_first, retries = "", True, Retries(self.url, notice)
        while True:
            try:
                for event in self._stream(run_id, after, wanted, notice):
                    after, last, is_first = event.seq, event.type, False
                    retries.reset()
                    yield event
                is_first = False
                if last in FINAL or not wanted() or self._has_ended(run_id, after):
                    return
                why = "the run is parked, and no server has resumed it" if last == PARKED else "the stream ended early"
            except httpx2.ConnectError as error:
                if is_first:
                    raise self._no_server(error) from None
                why = _why(error)
            except httpx2.TransportError as error:
                why = _why(error)
            except _Unavailable as unavailable:
                why = str(unavailable)
            is_first = False
            if retries.exhausted:
                command = f"penstock runs tail {run_id} --after {after}{self.at}"
                waited = f"{self.url} did not answer for {retries.total_s:.0f} s ({why})"
                raise Lost(f"{waited}; follow the run again with: {command}")
            retries.pause(why)

    def _has_ended(self, run_id: str, after: int) -> bool:
        """Whether a stream ended without the run's final event because the client has already seen that event.

        A run that was parked when its stream ended may have ended since; then its final event is still to come.
        """
        response = self._client.get(f"/api/runs/{escaped(run_id)}")
        if response.status_code != 200:
            return False
        run = response.json()
        return f"run.{run['status']}" in FINAL and after >= run["last_seq"]

    def check_graph(self, graph_id: str) -> None:
        """Raise Failed, listing the existing graphs, if the server has no such graph."""
        try:
            self.get(f"/api/graphs/{escaped(graph_id)}")  # archived graphs and later pages are not in the list
        except Failed:
            ids = [str(graph["id"]) for graph in self.get("/api/graphs")["graphs"]]
            listed = ", ".join(ids[:MAX_LISTED]) or "none"
            raise Failed(f"there is no graph {printable(graph_id)!r}; the server has: {listed}") from None

    def log(self, run_id: str, size: int = PAGE) -> Iterator[RunEvent]:
        """Yield the events of a run up to now, without waiting for more."""
        after, last_seq = 0, 1
        while after < last_seq:
            page = self.get(f"/api/runs/{escaped(run_id)}/events", after=after, limit=size)
            for event in page["events"]:
                yield RunEvent(event["seq"], event["type"], event["data"])
            after = page["events"][-1]["seq"] if page["events"] else page["last_seq"]
            last_seq = page["last_seq"]

    def export(self, run_id: str) -> dict[str, Any]:
        """Return everything stored about a run: `run`, `graph` and `events`."""
        exported: dict[str, Any] = {"graph": None, "events": []}
        try:
            with self._client.stream("GET", f"/api/runs/{escaped(run_id)}/export") as response:
                if response.status_code != 200:
                    response.read()
                    raise self._refusal(response)
                for line in response.iter_lines():
                    for name, value in _object(line).items():
                        exported["events"].append(value) if name == "event" else exported.update({name: value})
        except httpx2.TransportError as error:
            raise Failed(f"{self.url} did not answer: {_why(error)}") from None
        if len(exported["events"]) < exported["run"]["last_seq"]:
            raise Failed(f"{self.url} stopped in the middle of the export; try again")
        return exported

    def _stream(
        self, run_id: str, after: int, wanted: Callable[[], bool], notice: Callable[[str], None]
    ) -> Iterator[RunEvent]:
        headers = {"accept": "text/event-stream", "last-event-id": str(after)}
        path = f"/api/runs/{escaped(run_id)}/events"
        timeout = httpx2.Timeout(SILENCE_S, connect=CONNECT_S)
        with self._client.stream("GET", path, headers=headers, timeout=timeout) as response:
            if response.status_code == NOTHING_MORE:
                return
            if response.status_code != 200:
                response.read()
                raise self._refusal(response)
            response.encoding = "utf-8"
            lines = takewhile(lambda _: wanted(), _lines(response.iter_text()))
            yield from read_events(self._checking_readiness(lines, notice))

    def _checking_readiness(self, lines: Iterator[str], notice: Callable[[str], None]) -> Iterator[str]:
        """Pass the lines through; on each keep-alive comment, check whether the server is ready.

        A run whose database rejects writes emits no events and looks like a busy run. Each outage is reported once.
        """
        reported = False
        for line in lines:
            if line.startswith(":"):
                why = self._unready()
                if why and not reported:
                    notice(f"no events from {self.url}: {why}; events continue when that is fixed")
                reported = bool(why)
            yield line

    def _unready(self) -> str:
        """Return why the server is not ready; empty if it is ready or does not answer."""
        try:
            response = self._client.get("/ready")
        except httpx2.TransportError:
            return ""  # the stream itself will break or continue
        return _error_message(response) if response.status_code == 503 else ""

    def _request(self, method: str, path: str, attempts: int, **request: Any) -> Any:
        try:
            response = self._client.request(method, path, **request)
        except httpx2.ConnectError as error:
            raise self._no_server(error) from None
        except httpx2.TransportError as error:
            if attempts > 1:
                return self._request(method, path, attempts - 1, **request)
            raise Failed(f"{self.url} did not answer: {_why(error)}") from None
        if response.status_code >= 300:
            raise self._refusal(response)
        return self._read(response)

    def _read(self, response: httpx2.Response) -> Any:
        try:
            return response.json() if response.content else None
        except ValueError:
            raise Failed(f"the server at {self.url} is not Penstock: its response is not JSON") from None

    def _no_server(self, error: Exception) -> Failed:
        advice = "start one with `penstock serve`, or name another with --url"
        return Failed(f"no server answers at {self.url}: {_why(error)}; {advice}")

    def _refusal(self, response: httpx2.Response) -> Failed:
        message = _error_message(response)
        if response.status_code == 401:
            fact = f"refuses the token: {message}" if "authorization" in response.request.headers else "needs a token"
            return Failed(f"{self.url} {fact}; set PENSTOCK_TOKEN, or use --token")
        if response.status_code == 429:
            wait_s = response.headers.get("retry-after")
            return Failed(f"{message}; try again in {wait_s} s" if wait_s and "try again" not in message else message)
        if response.status_code in (502, 503, 504):
            return _Unavailable(message)
        return NotFound(message) if response.status_code == 404 else Failed(message)


class Retries:
    """Limits how long a broken stream is retried; a new event resets it."""

    def __init__(self, url: str, notice: Callable[[str], None]) -> None:
        self._url = url
        self._notice = notice
        self._breaks = 0
        self.total_s = sum(PAUSES_S)

    @property
    def exhausted(self) -> bool:
        """Whether all attempts are used up."""
        return self._breaks >= len(PAUSES_S)

    def reset(self) -> None:
        """Reset the attempts: an event has arrived."""
        self._breaks = 0

    def pause(self, why: str) -> None:
        """Wait, longer each time; a lasting problem is reported once."""
        if self._breaks == UNREPORTED_BREAKS:
            left_s = sum(PAUSES_S[self._breaks :])
            self._notice(f"no events from {self._url}: {why}; retrying for {left_s:.0f} s")
        time.sleep(PAUSES_S[self._breaks])
        self._breaks += 1


class _Unavailable(Failed):
    """The server is temporarily unavailable; the request may be retried."""


def _lines(pieces: Iterator[str]) -> Iterator[str]:
    """Split a stream into lines at line feeds only: JSON may contain other characters that Python splits at."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from (line.removesuffix("\r") for line in lines)


def read_events(lines: Iterator[str]) -> Iterator[RunEvent]:
    """Parse server-sent events; comments and events without a number are skipped."""
    seq, kind, data = 0, "", list[str]()
    for line in lines:
        if not line:
            if data and seq:
                yield RunEvent(seq, kind, _object("\n".join(data)).get("data") or {})
            seq, kind, data = 0, "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id" and value.isascii() and value.isdigit():
            seq = int(value)
        elif field == "event":
            kind = value
        elif field == "data":
            data.append(value)


def escaped(id: str) -> str:
    """Escape an id so that it is always a single path segment."""
    return quote(id, safe="")


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise Failed(f"the server sent an event that is not JSON: {text[:80]!r}") from None
    return value if isinstance(value, dict) else {"value": value}


def _error_message(response: httpx2.Response) -> str:
    """Return the error message of the response, or its status."""
    try:
        error = response.json()["error"]
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code} {response.reason_phrase}".rstrip()


def _at(url: str) -> str:
    return "" if url == (os.environ.get("PENSTOCK_URL") or URL).rstrip("/") else f" --url {shlex.quote(url)}"


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise Refused(f"--url must be the address of a server, such as {URL}, not {url!r}")
    if parts.path.rstrip("/") in API_PATHS:
        without = url[: url.index(parts.path, len(parts.scheme) + 3)]
        raise Refused(f"--url must not have the path {parts.path.rstrip('/')}; use {without}")
    return url.rstrip("/")


def _header(token: str) -> str:
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        raise Refused("--token must be printable ASCII without spaces")
    return token


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
