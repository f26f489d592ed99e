"""Find out why the worst case of a request is unknown: its body refers to content or work outside of it.

The hold of a request covers its own text and the images in it. The provider's additions to its input (stored turns,
files and images by id or address, results of the tools that the provider itself runs) are unknown until they are
billed. The same holds for documents and videos, whose size says little about their tokens, and for a tier with prices
of its own.

Knows the bodies of the three wires, and nothing of runs or limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.providers.http.request import ModelRequest

_REFERENCES = ("previous_response_id", "conversation", "prompt", "container", "mcp_servers", "cachedContent")
_ALWAYS = ("web_search_options", "plugins")
_DEARER = {"service_tier": "priority", "speed": "fast"}
"""Values of fields that make every token more expensive than the known price."""
_OUR_TOOLS = frozenset({"function", "custom", "local_shell", "shell", "apply_patch"})
"""Types of tools that the client runs; Anthropic's own have a date at their end."""
_CLIENT_TOOLS = ("bash_", "text_editor_", "computer_", "memory_")
_FILES = ("file_id", "file_url", "fileData", "file_data_uri")
_IMAGES = ("image", "image_url", "input_image")
_PAGED = ("application/", "video/")
"""Prefixes of media types whose size says little about their token count."""
_GOOGLES_TOOLS = frozenset(
    {
        *("googleSearch", "googleSearchRetrieval", "googleMaps", "urlContext", "codeExecution", "fileSearch"),
        *("google_search", "google_search_retrieval", "google_maps", "url_context", "code_execution", "file_search"),
    }
)


def unbounded_by(request: ModelRequest) -> str | None:
    """Return the reason why the worst case of the request is unknown; None if its hold covers everything."""
    return next(_unbounded(request.form.api, request.body), None)


def _unbounded(api: str, body: Mapping[str, Any]) -> Iterator[str]:
    for name, dearer in _DEARER.items():
        if body.get(name) == dearer:
            yield f"{name}: {dearer}"
    for name in _ALWAYS:
        if body.get(name) is not None:
            yield name
    for name in _REFERENCES:
        if body.get(name) is not None and (name != "prompt" or api == "responses"):
            yield name
    for tool in _list(body.get("tools")):
        if isinstance(tool, dict) and (server_tool := _server_tool(tool)):
            yield f"the tool {server_tool}"
    for name in ("input", "messages", "contents", "system", "systemInstruction", "system_instruction"):
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
            yield from _media(part)
            todo += [value for value in part.values() if isinstance(value, dict | list)]


def _media(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the images and documents of unknown cost in a part of a body, in any of the wires."""
    kind, source = part.get("type"), part.get("source")
    by = source.get("type") if isinstance(source, dict) else None
    if kind == "document" and by in ("url", "file"):
        yield f"a document by {by}"
    if kind in _IMAGES and (by in ("url", "file") or _is_remote(part.get("image_url"))):
        yield "an image by its address"
    if part.get("file_data") is not None or (kind == "document" and by == "base64") or _is_paged(part):
        yield "a document"


def _is_remote(image: object) -> bool:
    url = image.get("url") if isinstance(image, dict) else image
    return isinstance(url, str) and not url.lower().lstrip().startswith("data:")


def _is_paged(part: Mapping[str, Any]) -> bool:
    """Whether an object is a document or a video in Gemini's format."""
    inline = part.get("inlineData") or part.get("inline_data")
    if not isinstance(inline, dict):
        return False
    media = inline.get("mimeType") or inline.get("mime_type")
    return isinstance(media, str) and media.lower().startswith(_PAGED)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
