"""http.client, and everything on top of it: urllib.request, urllib3, and so requests and botocore.

This module never imports them. All of these libraries write requests with `HTTPConnection.send`, one call for the
headers and more for the body, and read responses from the file that `getresponse` leaves in `HTTPResponse.fp`; urllib3
even reads the chunks from that file itself. So these two places are wrapped, and not urllib3: a request is counted
once, and each attempt of a library's own retry is counted.

The request. Everything sent from `putrequest` on is gathered. When the headers are complete, a request that is no model
request is sent unchanged. The body of a model request is gathered to its end, and sent as the admission allows. A
request that was begun before its scope belongs to it if its headers were not sent yet; else only its body comes by
here, and it is reported.

The response. Its file is replaced by one with the bytes that pass the exchange, framed as the provider framed them: in
chunks as they come, or in a body of the declared length. So all ways of reading work, and the connection is reused as
before: when the response was read to its end, and not if it was cut.

HTTP/2, an experiment of urllib3, is not covered.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import PenstockError
from penstock.providers.current import is_in_scope, may_apply, pass_by, terms_for
from penstock.providers.hooks import Method, Patch
from penstock.providers.http.exchange import Exchange, Terms, admit
from penstock.providers.http.forms import Form, form_of
from penstock.providers.http.request import COMMON_PATHS, is_signed, parse_request
from penstock.providers.reading.bodies import ERROR_BYTES, Capped, Sink, decoded
from penstock.providers.reading.families import in_the_families
from penstock.providers.stacks.flight import abandon, fail, shut_down, waited
from penstock.providers.stacks.gathering import Gathered
from penstock.providers.uncontained import report_if_model

OUTGOING = "_penstock_outgoing"
"""Attribute of a connection: the request that is being gathered; None when it was sent."""
FLIGHT = "_penstock_flight"
"""Attribute of a connection: the contained request that was sent and has no response yet."""
PIECE = 65_536
Send = Callable[[Any, Any], None]
"""`HTTPConnection.send`."""
_END_OF_HEAD = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_HEADERS_ENDED = "Request-sent"
"""State of a connection from `endheaders` to `getresponse`."""
_UNSEEN = object()
"""The request of a connection that was begun before these methods were patched, or that is no POST."""
_ANY_MODEL_PATH = "/chat/completions"
_REPLACED = (b"content-length", b"transfer-encoding", b"accept-encoding")


class Head(Mapping[str, str]):
    """The request line and the headers of a request, parsed when they are first used; names are in lower case."""

    def __init__(self, method: str, target: str, server: str, raw: bytes) -> None:
        self.method = method
        self.host = server
        """The server that answers, which is not the proxy in between."""
        self.path = target.partition("?")[0]
        """Path of the request, without its query."""
        self._raw = raw
        if not target.startswith("/"):  # a proxy is given the whole address
            address = urlsplit(target)
            self.host, self.path = address.hostname or "", address.path

    @cached_property
    def _lines(self) -> list[bytes]:
        return self._raw.replace(b"\r\n\t", b" ").split(b"\r\n")

    @cached_property
    def _fields(self) -> dict[str, str]:
        fields: dict[str, str] = {}
        for line in self._lines[1:]:
            name, _, value = line.decode("latin-1").partition(":")
            fields[name.strip().lower()] = value.strip()
        return fields

    def __getitem__(self, name: str) -> str:
        return self._fields[name.lower()]

    def __contains__(self, name: object) -> bool:
        # Most look-ups are for a header that the request does not have: it is not parsed for them.
        found = isinstance(name, str) and name.lower().encode() in self._raw.lower()
        return found and name.lower() in self._fields  # type: ignore[attr-defined]  # it is a string

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def rewritten(self, length: int) -> bytes:
        """Return the head of the same request with a body of that length, accepting only uncompressed responses."""
        lines = [line for line in self._lines if line.partition(b":")[0].lower() not in _REPLACED]
        lines += [b"Accept-Encoding: identity", b"Content-Length: %d" % length, b"", b""]
        return b"\r\n".join(lines)


class Outgoing:
    """A request while a library writes it."""

    def __init__(self, method: str, target: str) -> None:
        self._method = method
        self._target = target
        self._gathered = Gathered()
        self._head: Head | None = None
        """None until the headers are complete."""
        self._body_begin = 0
        self._terms: Terms | None = None
        self._form: Form | None = None
        self._has_begun = False
        """Whether its first bytes were sent outside of any scope."""

    def write(self, connection: Any, send: Send, data: Any) -> None:
        """Gather the bytes that the library sends; send the request when it is complete, or is no model request."""
        if self._has_begun or not (self._gathered.data or may_apply(self._method)):
            self._send_on(connection, send, data)
            return
        for piece in _pieces(connection, data):
            self._gathered.add(piece)
        head = self._head or self._read_head(connection)
        if head is None:
            return
        if self._form is None:
            self._pass(connection, send)
        elif self._is_complete(head):
            self.depart(connection, send)

    def _send_on(self, connection: Any, send: Send, data: Any) -> None:
        if self._has_begun and is_in_scope():
            connection.__dict__[OUTGOING] = None
            pass_by(self._method, _server_of(connection), self._target, {})
        self._has_begun = True
        send(connection, data)

    def _read_head(self, connection: Any) -> Head | None:
        end = self._gathered.data.find(_END_OF_HEAD)
        if end < 0:
            return None
        self._head = head = Head(self._method, self._target, _server_of(connection), bytes(self._gathered.data[:end]))
        self._body_begin = end + len(_END_OF_HEAD)
        self._form = form = form_of(head.method, head.host, head.path, head)
        if form is not None and not self._is_doubtful(form):
            self._terms = terms_for(head.method, head.host, head.path, head)
            if self._terms is None:
                self._form = None
        return head

    def _is_doubtful(self, form: Form) -> bool:
        """Whether only the body shows if this is a model request, outside of any scope."""
        return form.api in COMMON_PATHS and not form.is_provider and not is_in_scope()

    def _is_complete(self, head: Head) -> bool:
        if "transfer-encoding" in head:
            return self._gathered.data.endswith(_LAST_CHUNK) and _unchunked(self._body()) is not None
        length = head.get("content-length", "0")
        return not length.isdecimal() or len(self._gathered.data) - self._body_begin >= int(length)

    def _body(self) -> bytes:
        return bytes(self._gathered.data[self._body_begin :])

    def depart(self, connection: Any, send: Send) -> None:
        """Admit the model call and send it; send any other request unchanged.

        Also called when a library asks for the response to an incomplete request.
        """
        head, form = self._head, self._form
        if head is None:
            connection.__dict__[OUTGOING] = None
            self.report_unseen(connection)
        if head is None or form is None:
            return
        content = _unchunked(self._body()) if "transfer-encoding" in head else self._body()
        terms = self._terms or terms_for(head.method, head.host, head.path, head, content)
        request = None if content is None else parse_request(form, head, content)
        if request is None or terms is None:
            self._pass(connection, send)
            return
        connection.__dict__[OUTGOING] = None  # bytes sent while connecting, such as a tunnel request, are not gathered
        exchange = admit(terms, request, "sync")
        exchange.hold()
        flight = Flight(exchange, head)
        flight.send(connection, partial(send, connection, self._written(head, exchange)))
        connection.__dict__[FLIGHT] = flight

    def report_unseen(self, connection: Any) -> None:
        """Report a model request whose headers bypassed `write`: a subclass writes to the socket itself."""
        if self._head is None and not self._has_begun:
            report_if_model(self._method, str(connection.host), self._target)

    def _written(self, head: Head, exchange: Exchange) -> bytes:
        """Return the request as it was admitted; a signed one as it is, since the signature covers its headers too."""
        if is_signed(head):
            return bytes(self._gathered.data)
        body = exchange.body(head.host)
        return head.rewritten(len(body)) + body

    def _pass(self, connection: Any, send: Send) -> None:
        connection.__dict__[OUTGOING] = None
        send(connection, bytes(self._gathered.data))


def _server_of(connection: Any) -> str:
    """Return the host that answers, which is not the proxy in between."""
    return str(connection._tunnel_host or connection.host)


def _begun_unseen(connection: Any, data: Any) -> Outgoing | None:
    """Return the POST that was begun before the first scope of the process, if these are its headers.

    If they are its body, its path is not known any more: a body that names a model is reported as a model request.
    """
    if connection._HTTPConnection__state != _HEADERS_ENDED or connection._method != "POST" or not is_in_scope():
        return None
    outgoing = None
    if isinstance(data, bytes) and data.startswith(b"POST ") and data.endswith(_END_OF_HEAD):
        outgoing = Outgoing("POST", data.split(b" ", 2)[1].decode("latin-1"))
    else:
        names_model = isinstance(data, bytes | bytearray | memoryview) and b'"model"' in bytes(data)
        pass_by("POST", _server_of(connection), _ANY_MODEL_PATH if names_model else "/", {})
    connection.__dict__[OUTGOING] = outgoing
    return outgoing


def _pieces(connection: Any, data: Any) -> Iterable[bytes]:
    """Return the pieces that `HTTPConnection.send` would write: bytes, a file, or an iterable of bytes."""
    if hasattr(data, "read"):
        return connection._read_readable(data)  # type: ignore[no-any-return]
    try:
        return (memoryview(data).cast("B"),)  # type: ignore[return-value]
    except TypeError:
        return data  # type: ignore[no-any-return]


def _unchunked(body: bytes) -> bytes | None:
    """Return the content of a chunked body; None if it is incomplete or malformed."""
    content, begin = bytearray(), 0
    while (end := body.find(b"\r\n", begin)) >= 0:
        try:
            size = int(body[begin:end].partition(b";")[0], 16)
        except ValueError:
            return None
        if size == 0:
            return bytes(content)
        begin = end + 2 + size + 2
        content += body[end + 2 : begin - 2]
    return None


class Flight:
    """A contained request from its departure to its response."""

    def __init__(self, exchange: Exchange, head: Head) -> None:
        self._exchange = exchange
        self._head = head
        self._wire: Any = None
        """Socket of the request; None until it is connected."""
        self._is_left = False
        """Whether the caller was released while a worker is still connecting, sending or waiting."""
        self._is_answered = False
        """Whether the response is awaited, and settles the exchange."""

    def send(self, connection: Any, send: Callable[[], None]) -> None:
        """Connect, and send the request."""
        try:
            waited(self._exchange, partial(self._transmit, connection, send), self._end_late, self._leave)
        except BaseException as error:
            self._is_answered = True
            fail(self._exchange, error)

    def _transmit(self, connection: Any, send: Callable[[], None]) -> None:
        if connection.sock is None and connection.auto_open:
            try:
                connection.connect()
            except Exception as error:
                error.penstock_free = True  # type: ignore[attr-defined]  # nothing was sent
                raise
        self._wire = connection.sock
        if self._is_left:
            return
        self._exchange.token.check()
        send()

    def receive(self, connection: Any, receive: Callable[[], Any]) -> Any:
        """Wait for the response, and return it with its body observed."""
        self._is_answered = True
        self._wire = connection.sock
        try:
            response = waited(self._exchange, receive, self._end_late, self._leave)
        except BaseException as error:
            fail(self._exchange, error)
        return _received(self._exchange, self._head, response, self._wire)

    def close(self) -> None:
        """Settle a request whose connection is closed before its response was awaited."""
        if not self._is_answered:
            self._is_answered = True
            abandon(self._exchange)

    __del__ = close

    def _leave(self) -> None:
        self._is_left = True
        shut_down(self._wire)

    def _end_late(self, response: Any, error: BaseException | None) -> None:
        if response is not None:
            response.close()
        if self._wire is not None:
            self._wire.close()


def _received(exchange: Exchange, head: Head, response: Any, wire: Any) -> Any:
    """Return the response with its body observed; that of a non-success response is limited in size alone."""
    headers = response.headers
    coding = headers.get("content-encoding", "")
    if response.status >= 300:
        _replace_file(response, File, decoded(Capped(ERROR_BYTES), coding), partial(shut_down, wire), bool(coding))
        try:
            exchange.refused_by(response.status, head.host, head.path, headers.get("location"))
        except BaseException:
            response.close()
            raise
        return response
    cut = partial(shut_down, wire)
    sink = exchange.opened(headers.get("content-type", ""), coding, cut, headers)
    is_resized = bool(coding) or exchange.request.adds_usage
    _replace_file(response, partial(ExchangeFile, exchange), sink, cut, is_resized)
    return response


def _replace_file(response: Any, file: Callable[..., File], sink: Sink, cut: Callable[[], None], resized: bool) -> None:
    """Let `sink` read the body before the library does; a body whose length changes is passed on in chunks."""
    # A second response takes over the file and its framing, and removes the framing.
    kind: Any = type(response)
    source = kind.__new__(kind)
    source.__dict__.update(response.__dict__)
    if resized:
        for name in ("content-encoding", "content-length"):
            del response.headers[name]
        if not response.chunked:
            response.headers["Transfer-Encoding"] = "chunked"
            response.chunked, response.chunk_left, response.length = True, None, None
    response.fp = io.BufferedReader(file(source, sink, cut, response.chunked))


class File(io.RawIOBase):
    """The body of a response, as a file that a library reads in its place."""

    def __init__(self, source: Any, sink: Sink, cut: Callable[[], None], is_chunked: bool) -> None:
        self._source = source
        """A response of the library that reads the body from the connection."""
        self._sink = sink
        self._cut = cut
        self._is_chunked = is_chunked
        self._ready = b""
        """Bytes that are not passed on yet."""
        self._is_over = False

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._source.fileno())

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._is_over:
            self._ready = self._next()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._end()

    def _end(self) -> None:
        """Stop reading: the rest of the body would be taken for the next response."""
        if not self._is_over:
            self._is_over = True
            self._cut()
        self._close_source()

    def _next(self) -> bytes:
        """Read more of the body; return it as it is passed on."""
        try:
            passed = self._take()
        except PenstockError as error:
            self._end()
            raise in_the_families(error) from None
        return passed

    def _take(self) -> bytes:
        source = self._source
        chunk = self._read()
        passed = self._sink.take(chunk) if chunk else b""
        if not chunk or source.length == 0:
            passed += self._sink.end()
            self._is_over = True
        if not self._is_chunked:
            return passed
        framed = b"%x\r\n%b\r\n" % (len(passed), passed) if passed else b""
        return framed + _LAST_CHUNK if self._is_over else framed

    def _read(self) -> bytes:
        return bytes(self._source.read1(PIECE))

    def _close_source(self) -> None:
        self._source.close()


class ExchangeFile(File):
    """The body of a contained model call."""

    def __init__(self, exchange: Exchange, source: Any, sink: Sink, cut: Callable[[], None], is_chunked: bool) -> None:
        super().__init__(source, sink, cut, is_chunked)
        self._exchange = exchange
        self._is_left = False
        """Whether a worker is still reading; it closes the source when it is done."""

    def close(self) -> None:
        if not self.closed:
            abandon(self._exchange)
        super().close()

    def _next(self) -> bytes:
        try:
            passed = self._take()
        except BaseException as error:
            failure = self._exchange.failed(error)
            self._end()  # the client may never close a response that it could not read
            if failure is error:
                raise
            raise failure from error
        if self._is_over:
            self._exchange.ended()
        return passed

    def _read(self) -> bytes:
        chunk: bytes = waited(self._exchange, super()._read, self._read_late, self._leave)
        if not chunk:
            self._exchange.token.check()  # a stop that shut the socket down looks like the end of the body
        return chunk

    def _leave(self) -> None:
        self._is_left = True
        self._cut()

    def _read_late(self, chunk: object, error: BaseException | None) -> None:
        self._source.close()

    def _close_source(self) -> None:
        if not self._is_left:
            self._source.close()


def _putrequest(original: Method) -> Method:
    def putrequest(connection: Any, method: str, url: str, *args: Any, **options: Any) -> Any:
        result = original(connection, method, url, *args, **options)
        if method.upper() == "POST":
            connection.__dict__[OUTGOING] = Outgoing(method, url)
        return result

    return putrequest


def _send(original: Method) -> Method:
    def send(connection: Any, data: Any) -> None:
        outgoing = connection.__dict__.get(OUTGOING, _UNSEEN)
        if outgoing is _UNSEEN:
            outgoing = _begun_unseen(connection, data)
        if outgoing is None:
            original(connection, data)
        else:
            outgoing.write(connection, original, data)

    return send


def _getresponse(original: Method) -> Method:
    def getresponse(connection: Any) -> Any:
        if (outgoing := connection.__dict__.get(OUTGOING)) is not None:
            outgoing.depart(connection, type(connection).send)
        flight = connection.__dict__.pop(FLIGHT, None)
        return original(connection) if flight is None else flight.receive(connection, partial(original, connection))

    return getresponse


def _close(original: Method) -> Method:
    def close(connection: Any) -> None:
        outgoing = connection.__dict__.pop(OUTGOING, None)
        if outgoing is not None and connection._HTTPConnection__state == _HEADERS_ENDED:
            outgoing.report_unseen(connection)
        if (flight := connection.__dict__.pop(FLIGHT, None)) is not None:
            flight.close()
        original(connection)

    return close


PATCHES = tuple(
    Patch("http.client", "HTTPConnection", method, wrap)
    for method, wrap in (
        ("putrequest", _putrequest),
        ("send", _send),
        ("getresponse", _getresponse),
        ("close", _close),
    )
)
