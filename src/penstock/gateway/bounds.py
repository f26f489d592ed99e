"""Find what makes the worst case of a request unknown: content and work that its body only refers to.

The hold of a request covers its own text and the largest images. What a provider adds to its input afterwards (stored
turns, files by id or address, results of the tools that the provider itself runs) is unknown until it is billed.

Knows the bodies of the three wires, and nothing of runs or limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.providers.http.request import ModelRequest

_REFERENCES = ("previous_response_id", "conversation", "prompt", "container", "mcp_servers", "cachedContent")
_ALWAYS = ("web_search_options", "plugins")
_OUR_TOOLS = frozenset({"function", "custom", "local_shell", "shell", "apply_patch"})
"""Types of tools that the client runs; Anthropic's own have a date at their end."""
_CLIENT_TOOLS = ("bash_", "text_editor_", "computer_", "memory_")
_FILES = ("file_id", "file_url", "fileData", "file_data_uri")
_GOOGLES_TOOLS = frozenset(
    {
        *("googleSearch", "googleSearchRetrieval", "googleMaps", "urlContext", "codeExecution", "fileSearch"),
        *("google_search", "google_search_retrieval", "google_maps", "url_context", "code_execution", "file_search"),
    }
)


def unbounded_by(request: ModelRequest) -> str | None:
    """Return the name of what makes the worst case of the request unknown; None if its hold covers everything."""
    return next(_unbounded(request.form.api, request.body), None)


def _unbounded(api: str, body: Mapping[str, Any]) -> Iterator[str]:
    for name in _ALWAYS:
        if body.get(name) is not None:
            yield name
    for name in _REFERENCES:
        if body.get(name) is not None and (name != "prompt" or api == "responses"):
            yield name
    for tool in _list(body.get("tools")):
        if isinstance(tool, dict) and (server_tool := _server_tool(tool)):
            yield f"the tool {server_tool}"
    for name in ("input", "messages", "contents", "system"):
        yield from _files(body.get(name))


def _server_tool(tool: Mapping[str, Any]) -> str | None:
    """Return the name of a tool that the provider runs."""
    if googles := _GOOGLES_TOOLS.intersection(tool):
        return min(googles)
    kind = tool.get("type")
    if not isinstance(kind, str) or kind in _OUR_TOOLS or kind.startswith(_CLIENT_TOOLS):
        return None
    return kind


def _files(root: object) -> Iterator[str]:
    # A stack, not recursion: a conversation may be nested as deep as JSON allows.
    todo = [root]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            yield from (f"a file by reference ({name})" for name in _FILES if part.get(name) is not None)
            source = part.get("source")
            if part.get("type") == "document" and isinstance(source, dict) and source.get("type") in ("url", "file"):
                yield f"a document by {source['type']}"
            todo += [value for value in part.values() if isinstance(value, dict | list)]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
