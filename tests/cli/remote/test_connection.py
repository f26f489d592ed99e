"""What is read out of a stream of server-sent events, and what addresses and tokens are refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from penstock.cli.exits import Failed, Lost, Refused
from penstock.cli.remote import connection
from penstock.cli.remote.connection import PAGE, PAUSES_S, Connection, escaped, read_events
from penstock.cli.render.events import RunEvent
from tests.cli.remote.live import serving


def read(text: str) -> list[RunEvent]:
    return list(read_events(iter(text.split("\n"))))


def test_an_event_has_a_number_a_type_and_data() -> None:
    assert read('id: 3\nevent: text.delta\ndata: {"data": {"text": "a:b"}}\n\n') == [
        RunEvent(3, "text.delta", {"text": "a:b"})
    ]


def test_comments_and_events_without_a_number_are_passed_over() -> None:
    assert read(": still here\n\nevent: x\ndata: {}\n\nid: 1\nevent: y\ndata: {}\n\n") == [RunEvent(1, "y", {})]


def test_incomplete_event_is_not_yielded() -> None:
    assert read('id: 1\nevent: y\ndata: {"a":') == []


def test_data_on_several_lines_is_one() -> None:
    assert read('id: 1\nevent: y\ndata: {"data": {"a":\ndata: 1}}\n\n') == [RunEvent(1, "y", {"a": 1})]


def test_data_that_is_not_json_is_reported() -> None:
    with pytest.raises(Failed, match="not JSON"):
        read("id: 1\nevent: y\ndata: {\n\n")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8642", "ftp://host", "http://", "http://host:0", "http://h:99999"])
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(Refused, match="--url"):
        Connection(url)


@pytest.mark.parametrize("token", ["", "a b", "a\nb", "käse"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(Refused, match="--token"):
        Connection(token=token)


def test_missing_server_is_reported_with_advice() -> None:
    with Connection("http://127.0.0.1:9") as server, pytest.raises(Failed, match="penstock serve"):
        server.get("/health")


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/mcp", "/api"])
def test_a_path_of_the_server_is_no_part_of_its_address(path: str) -> None:
    with pytest.raises(Refused, match=rf"must not have the path {path.rstrip('/')}; use http://v1:1$"):
        Connection(f"http://v1:1{path}")


class Answering(BaseHTTPRequestHandler):
    """Answers what the test has for each path, one after the other; the last one again and again."""

    answers: ClassVar[dict[str, list[tuple[int, str]]]]

    def do_GET(self) -> None:
        answers = self.answers[self.path]
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("retry-after", "60")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is written to the terminal of the tests."""


EVENTS, RUN = "/api/runs/r/events", "/api/runs/r"
CLOSING = (503, '{"error": {"message": "the server is closing; ask again"}}')


def event_stream(*events: tuple[str, int]) -> tuple[int, str]:
    return 200, "".join(f'id: {seq}\nevent: {kind}\ndata: {{"data": {{}}}}\n\n' for kind, seq in events)


@contextmanager
def answering(**answers: list[tuple[int, str]]) -> Iterator[Connection]:
    """A connection to a server that answers so: `events` of the run, the `run`, and whether it is `ready`."""
    paths = {"events": EVENTS, "run": RUN, "ready": "/ready"}
    handler = type("Here", (Answering,), {"answers": {paths[name]: answers[name] for name in answers}})
    with HTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            with Connection(f"http://127.0.0.1:{listening.server_port}") as server:
                yield server
        finally:
            listening.shutdown()
            thread.join()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The length of each wait, one after the other; none is real."""
    waited: list[float] = []
    monkeypatch.setattr(connection.time, "sleep", waited.append)
    return waited


def test_run_that_ended_between_two_connections_is_followed_to_its_end(pauses: list[float]) -> None:
    first, rest = [("run.started", 1), ("run.parked", 2)], [("run.resumed", 3), ("run.completed", 4)]
    ended = (200, '{"status": "completed", "last_seq": 4}')
    with answering(events=[event_stream(*first), event_stream(*rest), (204, "")], run=[ended]) as server:
        assert [(event.type, event.seq) for event in server.events("r")] == [*first, *rest]
        assert list(server.events("r", after=4)) == []


def test_restarting_server_is_waited_for_and_reported_once(pauses: list[float]) -> None:
    notices: list[str] = []
    away = [CLOSING] * (len(PAUSES_S) - 1)
    with answering(
        events=[event_stream(("run.started", 1)), *away, event_stream(("run.completed", 2))], run=[CLOSING]
    ) as server:
        events = [event.seq for event in server.events("r", notice=notices.append)]
        url = server.url
    assert events == [1, 2]
    assert tuple(pauses) == PAUSES_S
    assert sum(pauses) > 60
    assert sorted(pauses) == pauses
    assert notices == [f"no events from {url}: the server is closing; ask again; retrying for 60 s"]


def test_whatever_comes_renews_the_patience(pauses: list[float]) -> None:
    away = [CLOSING] * (len(PAUSES_S) - 1)
    pieces = [
        event_stream(("node.started", 1)),
        *away,
        event_stream(("node.started", 2)),
        *away,
        event_stream(("run.completed", 3)),
    ]
    with answering(events=pieces, run=[CLOSING]) as server:
        assert [event.seq for event in server.events("r", notice=lambda _: None)] == [1, 2, 3]
    assert tuple(pauses) == PAUSES_S * 2


def test_a_server_that_does_not_come_back_is_lost_with_what_takes_it_up_again(pauses: list[float]) -> None:
    with answering(events=[event_stream(("run.started", 1)), CLOSING], run=[CLOSING]) as server:
        with pytest.raises(Lost) as lost:
            list(server.events("r", notice=lambda _: None))
        again = f"penstock runs tail r --after 1 --url {server.url}"
    assert str(lost.value).endswith(
        f" did not answer for 62 s (the server is closing; ask again); follow the run again with: {again}"
    )
    assert lost.value.code == 75
    assert tuple(pauses) == PAUSES_S


class Leaving(Answering):
    """Listens no more when it answers."""

    answers: ClassVar = {EVENTS: [(204, "")]}

    def do_GET(self) -> None:
        self.server.server_close()
        super().do_GET()


def test_a_server_that_goes_after_a_stream_without_news_is_waited_for_too(pauses: list[float]) -> None:
    with HTTPServer(("127.0.0.1", 0), Leaving) as listening:
        thread = threading.Thread(target=listening.handle_request)
        thread.start()
        with Connection(f"http://127.0.0.1:{listening.server_port}") as server, pytest.raises(Lost, match="refused"):
            list(server.events("r", after=7, notice=lambda _: None))
        thread.join()
    assert tuple(pauses) == PAUSES_S


def test_unready_server_is_reported_once_per_outage(
    pauses: list[float],
) -> None:
    notices: list[str] = []
    locked = (503, '{"error": {"message": "a store cannot be written to"}}')
    ready = [locked, locked, (200, "{}"), locked, (200, "{}")]
    beats = event_stream(("run.started", 1))[1] + ":\n\n" * 5 + event_stream(("run.completed", 2))[1]
    with answering(events=[(200, beats)], ready=ready) as server:
        assert [event.seq for event in server.events("r", notice=notices.append)] == [1, 2]
        url = server.url
    assert notices == [f"no events from {url}: a store cannot be written to; events continue when that is fixed"] * 2


def test_retry_delay_is_reported_once(pauses: list[float]) -> None:
    full = (429, '{"error": {"message": "9 runs wait already, of 9 that may; try again in 60 s"}}')
    with answering(run=[full]) as server, pytest.raises(Failed, match=r"may; try again in 60 s$"):
        server.get(RUN)


def test_an_id_stays_one_part_of_a_path() -> None:
    assert escaped("../a/b?c#d") == "..%2Fa%2Fb%3Fc%23d"


def test_a_log_is_read_page_by_page_to_where_it_is_now() -> None:
    with serving() as live, Connection(live.url) as server:
        run_id = live.start("pipeline", "hello")
        live.ended(run_id)
        everything = list(server.log(run_id))
        assert [event.seq for event in everything] == list(range(1, len(everything) + 1))
        assert everything[-1].type == "run.completed"
        assert all(list(server.log(run_id, size)) == everything for size in (1, 4, len(everything), PAGE))
        waiting = live.start("publish", "hello")
        live.until(waiting, "run.waiting")
        assert [event.type for event in server.log(waiting)].count("run.waiting") == 1, "and nothing is waited for"
        with pytest.raises(Failed, match="there is no such run"):
            list(server.log("nothing"))
