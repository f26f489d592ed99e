"""Read the text fields of a multipart form."""

from __future__ import annotations

import httpx2
import pytest

from penstock.providers.http.multipart import MAX_FIELD_BYTES, form_fields


def encoded(data: dict[str, str], files: dict[str, bytes]) -> tuple[str, bytes]:
    request = httpx2.Request("POST", "http://127.0.0.1/", data=data, files=files)
    return request.headers["content-type"], request.read()


def test_fields_are_read_and_files_are_not_copied() -> None:
    kind, content = encoded({"model": "whisper-1", "prompt": "né\r\nto"}, {"file": b"\0\r\n--" * 50_000})
    assert form_fields(kind, content) == {"model": "whisper-1", "prompt": "né\r\nto", "file": ""}


def test_a_field_of_the_size_of_a_file_is_not_read() -> None:
    kind, content = encoded({"model": "m", "prompt": "x" * (MAX_FIELD_BYTES + 1)}, {"file": b""})
    assert form_fields(kind, content) == {"model": "m", "prompt": "", "file": ""}


@pytest.mark.parametrize("kind", ["application/json", "", "multipart/form-data", "multipart/mixed; boundary=x"])
def test_other_bodies_are_no_forms(kind: str) -> None:
    assert form_fields(kind, b"--x\r\n\r\n--x--") is None


@pytest.mark.parametrize("content", [b"", b"--x", b"--x\r\nname", b"--x\r\n\r\n--x--", b"garbage"])
def test_a_damaged_form_has_no_fields(content: bytes) -> None:
    assert form_fields("multipart/form-data; boundary=x", content) == {}
