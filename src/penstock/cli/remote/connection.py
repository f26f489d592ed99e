"""A server, as the commands see it: requests with answers, and events that come.

What goes wrong is said in one sentence with what to do about it. A stream that breaks is taken up again where it broke,
for as long as a server takes to be stopped in order and started again; nothing of it is missed or told twice, because
the server counts its events.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import takewhile
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import httpx2

from penstock.cli.exits import Failed, Lost, Refused
from penstock.cli.options import URL
from penstock.cli.showing.screen import complain, printable

CONNECT_S = 5.0
ANSWER_S = 60.0
SILENCE_S = 60.0
"""A stream that says nothing for so long, not even that it is there, has broken: servers say so every 15 s."""
TRIES = 3
"""So often is asked what can be asked again without doing it twice, if the connection breaks."""
PAUSES_S = (0.1, 0.2, 0.5, 1.0, *[2.0] * 30)
"""Before each time that a stream is taken up again without anything new having come. Together they outlast a server
that lets its runs end, stops, is started again, and waits for what the one before it held: 10, 5, 5 and 15 s."""
QUIET_BREAKS = 4
"""So often a stream may break before that is worth a word."""
OURS = ("/v1", "/mcp", "/api")
"""Paths that people take for the address of a server, because some clients want them in it."""
PAGE = 500
"""So many events are asked for at once, which is as many as there are at most."""
SHOWN_GRAPHS = 10
ENDS = frozenset({"run.completed", "run.failed", "run.halted", "run.cancelled"})
PARKED = "run.parked"
NOTHING_MORE = 204
"""What a server says to whoever has seen the last event of a run."""


class Event(NamedTuple):
    """One event of a run."""

    seq: int
    type: str
    data: Mapping[str, Any]


class Connection:
    """One server, asked as one user; a context manager."""

    def __init__(self, url: str = URL, token: str | None = None) -> None:
        self.url = _checked(url)
        self.at = _at(self.url)
        """What stands behind a command that is to ask this server, where it would ask another one."""
        headers = {"accept": "application/json"}
        if token is not None:
            headers["authorization"] = f"Bearer {_header(token)}"
        self._client = httpx2.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
            follow_redirects=False,
            trust_env=False,  # a server of one's own is not behind the proxy that the web is behind
        )

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def get(self, path: str, **query: Any) -> Any:
        """What is there."""
        params = {name: one for name, one in query.items() if one is not None}
        return self._ask("GET", path, TRIES, params=params)

    def post(self, path: str, body: Any = None, *, is_named: bool = False) -> Any:
        """What came of it. A body that names what is to be made is sent again where nobody knows what came of it."""
        # Escaped, so that half a character arrives, and the server can say what is wrong with it.
        content = json.dumps({} if body is None else body).encode("ascii")
        headers = {"content-type": "application/json"}
        return self._ask("POST", path, TRIES if is_named else 1, content=content, headers=headers)

    def events(
        self,
        run_id: str,
        after: int = 0,
        *,
        wanted: Callable[[], bool] = lambda: True,
        notice: Callable[[str], None] = complain,
    ) -> Generator[Event, None, None]:
        """The events of a run after that one, as they come, until it has ended; one that is parked is waited for.

        Whether more are `wanted` is asked whenever something is heard of the server, be it that it is still there.
        What keeps events from coming goes to `notice`; Lost, when nobody has answered for long.
        """
        last, is_first, patience = "", True, Patience(self.url, notice)
        while True:
            try:
                for event in self._stream(run_id, after, wanted, notice):
                    after, last, is_first = event.seq, event.type, False
                    patience.renew()
                    yield event
                is_first = False
                if last in ENDS or not wanted() or self._has_ended(run_id, after):
                    return
                why = "the run is parked, and no server goes on with it" if last == PARKED else "the stream ended early"
            except httpx2.ConnectError as error:
                if is_first:
                    raise self._nobody(error) from None
                why = _why(error)
            except httpx2.TransportError as error:
                why = _why(error)
            except _Closing as closing:
                why = str(closing)
            is_first = False
            if patience.is_over:
                again = f"penstock runs tail {run_id} --after {after}{self.at} takes it up again"
                raise Lost(f"{self.url} was tried again for {patience.whole_s:.0f} s, last: {why}; {again}")
            patience.pause(why)

    def _has_ended(self, run_id: str, after: int) -> bool:
        """Whether a stream that is over without the run's last word is so because that was told before.

        A run that was parked when its stream ended may have come to its end since, and that is still to be told.
        """
        response = self._client.get(f"/api/runs/{escaped(run_id)}")
        if response.status_code != 200:
            return False
        run = response.json()
        return f"run.{run['status']}" in ENDS and after >= run["last_seq"]

    def check_graph(self, graph_id: str) -> None:
        """Failed, with those that there are, if the server has no such graph."""
        try:
            self.get(f"/api/graphs/{escaped(graph_id)}")  # one that is archived, or on a later page, is not in the list
        except Failed:
            ids = [str(graph["id"]) for graph in self.get("/api/graphs")["graphs"]]
            listed = ", ".join(ids[:SHOWN_GRAPHS]) or "none"
            raise Failed(f"there is no graph {printable(graph_id)!r}; the server has: {listed}") from None

    def log(self, run_id: str, size: int = PAGE) -> Iterator[Event]:
        """The events of a run up to now; nothing is waited for."""
        after, last_seq = 0, 1
        while after < last_seq:
            page = self.get(f"/api/runs/{escaped(run_id)}/events", after=after, limit=size)
            for one in page["events"]:
                yield Event(one["seq"], one["type"], one["data"])
            after = page["events"][-1]["seq"] if page["events"] else page["last_seq"]
            last_seq = page["last_seq"]

    def export(self, run_id: str) -> dict[str, Any]:
        """Everything that is kept of a run: `run`, `graph` and `events`."""
        kept: dict[str, Any] = {"graph": None, "events": []}
        try:
            with self._client.stream("GET", f"/api/runs/{escaped(run_id)}/export") as response:
                if response.status_code != 200:
                    response.read()
                    raise self._refusal(response)
                for line in response.iter_lines():
                    for name, value in _object(line).items():
                        kept["events"].append(value) if name == "event" else kept.update({name: value})
        except httpx2.TransportError as error:
            raise Failed(f"{self.url} did not answer: {_why(error)}") from None
        if len(kept["events"]) < kept["run"]["last_seq"]:
            raise Failed(f"{self.url} stopped in the middle of the export; ask again")
        return kept

    def _stream(
        self, run_id: str, after: int, wanted: Callable[[], bool], notice: Callable[[str], None]
    ) -> Iterator[Event]:
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
            yield from read_events(self._heeding_silence(lines, notice))

    def _heeding_silence(self, lines: Iterator[str], notice: Callable[[str], None]) -> Iterator[str]:
        """The lines. A server that has nothing to tell says that it is there; then it is asked whether it can work.

        A run whose database takes nothing is not heard of any more, and looks like one that thinks. It is said once.
        """
        is_said = False
        for line in lines:
            if line.startswith(":"):
                why = self._unready()
                if why and not is_said:
                    notice(f"nothing comes from {self.url}: {why}; it goes on when that is mended")
                is_said = bool(why)
            yield line

    def _unready(self) -> str:
        """Why the server cannot work now; nothing, if it can, or does not say."""
        try:
            response = self._client.get("/ready")
        except httpx2.TransportError:
            return ""  # its stream will break, or go on
        return _said(response) if response.status_code == 503 else ""

    def _ask(self, method: str, path: str, tries: int, **request: Any) -> Any:
        try:
            response = self._client.request(method, path, **request)
        except httpx2.ConnectError as error:
            raise self._nobody(error) from None
        except httpx2.TransportError as error:
            if tries > 1:
                return self._ask(method, path, tries - 1, **request)
            raise Failed(f"{self.url} did not answer: {_why(error)}") from None
        if response.status_code >= 300:
            raise self._refusal(response)
        return self._read(response)

    def _read(self, response: httpx2.Response) -> Any:
        try:
            return response.json() if response.content else None
        except ValueError:
            raise Failed(f"what answers at {self.url} is no Penstock: it sent no JSON") from None

    def _nobody(self, error: Exception) -> Failed:
        start = "; start one with `penstock serve`, or name another with --url"
        return Failed(f"no server answers at {self.url}: {_why(error)}{start}")

    def _refusal(self, response: httpx2.Response) -> Failed:
        said = _said(response)
        if response.status_code == 401:
            return Failed(f"{self.url} wants to know who is asking: {said}; set PENSTOCK_TOKEN")
        if response.status_code == 429:
            again = response.headers.get("retry-after")
            return Failed(f"{said}; try again in {again} s" if again and "try again" not in said else said)
        if response.status_code in (502, 503, 504):
            return _Closing(said)
        return Failed(said)


class Patience:
    """How long a stream that breaks is taken up again; whatever comes of it renews it."""

    def __init__(self, url: str, notice: Callable[[str], None]) -> None:
        self._url = url
        self._notice = notice
        self._breaks = 0
        self.whole_s = sum(PAUSES_S)

    @property
    def is_over(self) -> bool:
        """Whether it has been tried for long enough."""
        return self._breaks >= len(PAUSES_S)

    def renew(self) -> None:
        """Something has come."""
        self._breaks = 0

    def pause(self, why: str) -> None:
        """Wait, longer each time; what lasts is said once."""
        if self._breaks == QUIET_BREAKS:
            left_s = sum(PAUSES_S[self._breaks :])
            self._notice(f"nothing comes from {self._url}: {why}; it is tried again for {left_s:.0f} s")
        time.sleep(PAUSES_S[self._breaks])
        self._breaks += 1


class _Closing(Failed):
    """The server cannot answer now; a while later it may."""


def _lines(pieces: Iterator[str]) -> Iterator[str]:
    """The lines of a stream. Only line feeds end one: JSON may hold other things that Python takes for line ends."""
    rest = ""
    for piece in pieces:
        *whole, rest = (rest + piece).split("\n")
        yield from (line.removesuffix("\r") for line in whole)


def read_events(lines: Iterator[str]) -> Iterator[Event]:
    """The events in a stream of server-sent ones; comments and what has no number are passed over."""
    seq, kind, data = 0, "", list[str]()
    for line in lines:
        if not line:
            if data and seq:
                yield Event(seq, kind, _object("\n".join(data)).get("data") or {})
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
    """An id as a part of a path; whatever is in it, it stays one part."""
    return quote(id, safe="")


def _object(text: str) -> Mapping[str, Any]:
    try:
        read = json.loads(text)
    except ValueError:
        raise Failed(f"the server sent an event that is no JSON: {text[:80]!r}") from None
    return read if isinstance(read, dict) else {"value": read}


def _said(response: httpx2.Response) -> str:
    """The server's own words."""
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
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise Refused(f"--url must be the address of a server, such as {URL}, not {url!r}")
    if parts.path.rstrip("/") in OURS:
        without = url[: url.index(parts.path, len(parts.scheme) + 3)]
        raise Refused(f"--url is the address alone, without {parts.path.rstrip('/')}: {without}")
    return url.rstrip("/")


def _header(token: str) -> str:
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        raise Refused("--token must be printable ASCII without spaces")
    return token


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
