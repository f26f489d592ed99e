"""Split streams into their objects, however their bytes arrive."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.providers.reading.framing import ArraySplitter, EventSplitter, FrameSplitter, LineSplitter, Splitter
from penstock.testing.provider.formats.bedrock import frame

OBJECTS: list[dict[str, Any]] = [{"text": 'é "}]" {'}, {"n": 1}, {"deep": {"a": [1, {"b": "},{"}]}}]


def framed(objects: list[dict[str, Any]]) -> bytes:
    return b"".join(frame("event", data) for data in objects)


def in_array(objects: list[dict[str, Any]]) -> bytes:
    return json.dumps(objects, ensure_ascii=False, indent=1).encode()


def in_lines(objects: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(data).encode() + b"\n" for data in objects)


def in_events(objects: list[dict[str, Any]]) -> bytes:
    return b"".join(b": comment\n\nevent: x\ndata: " + json.dumps(data).encode() + b"\n\n" for data in objects)


FRAMINGS: dict[str, tuple[Callable[[], Splitter], Callable[[list[dict[str, Any]]], bytes]]] = {
    "events": (EventSplitter, in_events),
    "lines": (LineSplitter, in_lines),
    "array": (ArraySplitter, in_array),
    "frames": (FrameSplitter, framed),
}


def objects_of(splitter: Splitter, data: bytes, size: int) -> tuple[list[Any], bytes]:
    """The objects of a stream that arrives in pieces of this size, and all of its bytes."""
    buffer, found, passed = bytearray(), [], b""
    for begin in range(0, len(data), size):
        buffer += data[begin : begin + size]
        for part, event in splitter.split(buffer):
            passed += part
            if isinstance(event, dict):
                found.append(event.get("event", event))
    return found, passed + bytes(buffer)


@pytest.mark.parametrize("framing", FRAMINGS)
@given(size=st.integers(1, 200))
def test_every_object_is_found_and_every_byte_is_passed_on(framing: str, size: int) -> None:
    splitter, encode = FRAMINGS[framing]
    data = encode(OBJECTS)
    assert objects_of(splitter(), data, size) == (OBJECTS, data)


@pytest.mark.parametrize("framing", FRAMINGS)
@given(data=st.binary(max_size=300), size=st.integers(1, 50))
def test_damaged_streams_are_passed_on_too(framing: str, data: bytes, size: int) -> None:
    splitter, _ = FRAMINGS[framing]
    assert objects_of(splitter(), data, size)[1] == data


def test_the_events_of_a_vendor_are_unpacked_from_chunks() -> None:
    data = frame("chunk", {"bytes": "eyJ0eXBlIjogInBpbmcifQ==", "p": "ab"})
    assert objects_of(FrameSplitter(), data, 7)[0] == [{"type": "ping"}]
    assert objects_of(FrameSplitter(), frame("chunk", {"bytes": "%"}), 7)[0] == []


def test_an_exception_in_a_frame_is_an_error() -> None:
    headers = b"\x0d:message-type\x07\x00\x09exception" + b"\x0f:exception-type\x07\x00\x12throttledException"
    payload = b'{"message":"slow down"}'
    size = len(headers) + len(payload) + 16
    data = struct.pack(">III", size, len(headers), 0) + headers + payload + b"\0\0\0\0"
    ((_, event),) = FrameSplitter().split(bytearray(data))
    assert event == {"error": "throttledException: {'message': 'slow down'}"}


def test_headers_of_other_types_are_skipped() -> None:
    headers = b"\x01a\x00" + b"\x01b\x04\x00\x00\x00\x01" + b"\x01c\x06\x00\x02xx" + b"\x0b:event-type\x07\x00\x04ping"
    data = struct.pack(">III", len(headers) + 18, len(headers), 0) + headers + b"{}" + b"\0\0\0\0"
    ((_, event),) = FrameSplitter().split(bytearray(data))
    assert event == {"ping": {}}
