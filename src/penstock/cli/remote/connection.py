"""A server, as the commands see it: requests with answers, and events that come.

What goes wrong is said in one sentence with what to do about it. A stream that breaks is taken up again where it broke,
a few times; nothing of it is missed or told twice, because the server counts its events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import httpx2

from penstock.cli.exits import Failed, Refused
from penstock.cli.options import URL

CONNECT_S = 5.0
ANSWER_S = 60.0
SILENCE_S = 60.0
"""A stream that says nothing for so long, not even that it is there, has broken: servers say so every 15 s."""
RECONNECTS = 8
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class Event(NamedTuple):
    """One event of a run."""

    seq: int
    type: str
    data: Mapping[str, Any]


class Connection:
    """One server, asked as one user; a context manager."""

    def __init__(self, url: str = URL, token: str | None = None) -> None:
        self.url = _checked(url)
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
        return self._ask("GET", path, params={name: one for name, one in query.items() if one is not None})

    def post(self, path: str, body: Any = None) -> Any:
        """What came of it."""
        return self._ask("POST", path, json={} if body is None else body)

    def put(self, path: str, body: Any) -> Any:
        """What came of it."""
        return self._ask("PUT", path, json=body)

    def events(self, run_id: str, after: int = 0) -> Iterator[Event]:
        """The events of a run after that one, as they come; the last one is the run's own end."""
        broken = 0
        while True:
            try:
                for event in self._stream(run_id, after):
                    after, broken = event.seq, 0
                    yield event
                return
            except httpx2.TransportError as error:
                broken += 1
                if broken > RECONNECTS:
                    raise Failed(f"the connection to {self.url} broke {broken} times, last: {_why(error)}") from None
                time.sleep(PAUSES_S[min(broken, len(PAUSES_S)) - 1])

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
        return kept

    def _stream(self, run_id: str, after: int) -> Iterator[Event]:
        headers = {"accept": "text/event-stream", "last-event-id": str(after)}
        path = f"/api/runs/{escaped(run_id)}/events"
        timeout = httpx2.Timeout(SILENCE_S, connect=CONNECT_S)
        with self._client.stream("GET", path, headers=headers, timeout=timeout) as response:
            if response.status_code != 200:
                response.read()
                raise self._refusal(response)
            yield from read_events(response.iter_lines())

    def _ask(self, method: str, path: str, **request: Any) -> Any:
        try:
            response = self._client.request(method, path, **request)
        except httpx2.ConnectError as error:
            start = "; start one with `penstock serve`, or name another with --url"
            raise Failed(f"no server answers at {self.url}: {_why(error)}{start}") from None
        except httpx2.TransportError as error:
            raise Failed(f"{self.url} did not answer: {_why(error)}") from None
        if response.status_code >= 300:
            raise self._refusal(response)
        return response.json() if response.content else None

    def _refusal(self, response: httpx2.Response) -> Failed:
        said = _said(response)
        if response.status_code == 401:
            return Failed(f"{self.url} wants to know who is asking: {said}; set PENSTOCK_TOKEN")
        if response.status_code == 429:
            again = response.headers.get("retry-after")
            return Failed(f"{said}; try again in {again} s" if again else said)
        return Failed(said)


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


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise Refused(f"--url must be the address of a server, such as {URL}, not {url!r}")
    return url.rstrip("/")


def _header(token: str) -> str:
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        raise Refused("--token must be printable ASCII without spaces")
    return token


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
