"""The page that documents the API: every operation and type, and nothing from elsewhere."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from penstock.server import openapi
from penstock.server.api_page import METHODS, api_page
from tests.server.served import served


@pytest.fixture
def description() -> dict[str, Any]:
    with_markup = {"type": "string", "description": "a <b>bold</b> `code <i>`", "default": "<script>"}
    return {
        "info": {"title": "A & B", "version": "<1>"},
        "paths": {
            "/x/{id}": {
                "get": {
                    "tags": ["one & only"],
                    "description": "Read <x>.",
                    "parameters": [{"name": "<id>", "in": "path", "required": True, "schema": with_markup}],
                    "responses": {"200": {"description": "ok", "content": {"application/json": {"schema": {}}}}},
                }
            }
        },
        "components": {"schemas": {"Thing<T>": {"properties": {"a<b": with_markup}, "required": ["a<b"]}}},
    }


def test_text_of_the_description_is_never_markup(description: dict[str, Any]) -> None:
    page = api_page(description)
    assert "<script" not in page
    assert "<x>" not in page
    assert "&lt;b&gt;bold&lt;/b&gt; <code>code &lt;i&gt;</code>" in page
    assert html.escape("Thing<T>") in page


async def test_docs_lists_every_operation_and_every_type_without_loading_anything() -> None:
    async with served() as server, server.client("ann") as ann, server.client(None) as stranger:
        page = await stranger.get("/docs")
        described = (await ann.get("/api/openapi.json")).json()
    assert page.status_code == 200
    operations = [
        (method.upper(), path) for path, found in described["paths"].items() for method in METHODS if method in found
    ]
    shown = re.findall(r'<h3><b class="\w+">(\w+)</b> <code>([^<]+)</code></h3>', page.text)
    assert sorted(shown) == sorted((method, html.escape(path)) for method, path in operations)
    targets = set(re.findall(r' id="([^"]+)"', page.text))
    assert set(re.findall(r'href="#([^"]+)"', page.text)) <= targets
    assert set(re.findall(r'(?:src|href)="([^#"]+)"', page.text)) == {"api/openapi.json"}


async def test_docs_are_rendered_and_compressed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may request them, and both take milliseconds."""
    rendered = []
    monkeypatch.setattr(openapi, "api_page", lambda description: rendered.append(description) or api_page(description))
    async with served() as server:
        for encoding in ("gzip", "identity", "gzip"):
            async with server.client(None, **{"Accept-Encoding": encoding}) as client:
                page = await client.get("/docs")
            assert page.headers.get("content-encoding", "identity") == encoding
            assert page.headers["vary"] == "Accept-Encoding"
            assert page.text.endswith("</html>\n")
    assert len(rendered) == 1
