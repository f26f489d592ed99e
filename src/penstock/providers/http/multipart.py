"""Read the text fields of a multipart form, without copying its files."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_FIELD_BYTES = 65_536
"""A larger part is a file, and is not read."""
_BOUNDARY = re.compile(r'boundary="?([^";,]+)"?', re.I)
_NAME = re.compile(rb'(?<![a-z])name=(?:"([^"]*)"|([^";\s]+))', re.I)


def form_fields(content_type: str, content: bytes) -> dict[str, str] | None:
    """Return the fields of a form by name, a file as an empty text; None if the body is no multipart form."""
    found = _BOUNDARY.search(content_type)
    if found is None or not content_type.lower().startswith("multipart/form-data"):
        return None
    return dict(_parts(content, b"--" + found[1].strip().encode("latin-1", "replace")))


def _parts(content: bytes, boundary: bytes) -> Iterator[tuple[str, str]]:
    begin = content.find(boundary)
    while begin >= 0:
        begin += len(boundary)
        end = content.find(boundary, begin)
        if end < 0:
            return
        head_end = content.find(b"\r\n\r\n", begin, end)
        if head_end >= 0:
            head = content[begin:head_end]
            name = _NAME.search(head)
            if name is not None:
                is_file = b"filename" in head or end - head_end > MAX_FIELD_BYTES
                value = b"" if is_file else content[head_end + 4 : end].removesuffix(b"\r\n")
                yield (name[1] or name[2] or b"").decode("utf-8", "replace"), value.decode("utf-8", "replace")
        begin = end
