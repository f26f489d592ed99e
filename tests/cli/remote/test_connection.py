"""What is read out of a stream of server-sent events, and what addresses and tokens are refused."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from penstock.cli.exits import Failed, Refused
from penstock.cli.remote.connection import PAGE, Connection, Event, escaped, read_events
from tests.cli.remote.live import serving


def read(text: str) -> list[Event]:
    return list(read_events(iter(text.split("\n"))))


def test_an_event_has_a_number_a_type_and_data() -> None:
    assert read('id: 3\nevent: text.delta\ndata: {"data": {"text": "a:b"}}\n\n') == [
        Event(3, "text.delta", {"text": "a:b"})
    ]


def test_comments_and_events_without_a_number_are_passed_over() -> None:
    assert read(": still here\n\nevent: x\ndata: {}\n\nid: 1\nevent: y\ndata: {}\n\n") == [Event(1, "y", {})]


def test_an_event_that_is_not_whole_is_not_told() -> None:
    assert read('id: 1\nevent: y\ndata: {"a":') == []


def test_data_on_several_lines_is_one() -> None:
    assert read('id: 1\nevent: y\ndata: {"data": {"a":\ndata: 1}}\n\n') == [Event(1, "y", {"a": 1})]


def test_data_that_is_no_json_is_said_to_be() -> None:
    with pytest.raises(Failed, match="no JSON"):
        read("id: 1\nevent: y\ndata: {\n\n")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8642", "ftp://host", "http://", "http://host:0", "http://h:99999"])
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(Refused, match="--url"):
        Connection(url)


@pytest.mark.parametrize("token", ["", "a b", "a\nb", "käse"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(Refused, match="--token"):
        Connection(token=token)


def test_where_nobody_listens_is_said_with_what_to_do() -> None:
    with Connection("http://127.0.0.1:9") as server, pytest.raises(Failed, match="penstock serve"):
        server.get("/health")


class Parking(BaseHTTPRequestHandler):
    """A server whose first stream of events ends with a run that is parked, and has ended when somebody asks for it."""

    TOLD = (("run.started", 1), ("run.parked", 2), ("run.resumed", 3), ("run.completed", 4))

    def do_GET(self) -> None:
        if self.path.endswith("/events"):
            after = int(self.headers["last-event-id"])
            told = self.TOLD[:2] if not after else self.TOLD[after:]
            body = "".join(f'id: {seq}\nevent: {kind}\ndata: {{"data": {{}}}}\n\n' for kind, seq in told)
        else:
            body = '{"status": "completed", "last_seq": 4}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is written to the terminal of the tests."""


def test_a_run_that_ends_while_nobody_streams_it_is_told_to_its_end() -> None:
    with HTTPServer(("127.0.0.1", 0), Parking) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            with Connection(f"http://127.0.0.1:{listening.server_port}") as server:
                assert [(event.type, event.seq) for event in server.events("r")] == [*Parking.TOLD]
                assert list(server.events("r", after=4)) == []
        finally:
            listening.shutdown()
            thread.join()


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
