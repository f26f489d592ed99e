"""Write the UI's types of the API from the API's own OpenAPI description: `make ui-types`.

Only the bodies that the UI uses are written, and what they refer to. `tests/tools/test_ui_types.py` fails if the file
is not what the description gives.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.chat.service import ChatService
from penstock.hosting.host import RunHost
from penstock.server.app import create_app
from penstock.storage import open_stores

Json = Mapping[str, Any]
TYPES = Path(__file__).parent.parent / "ui" / "src" / "api" / "types.ts"
USED = (
    *("Me", "GraphPage", "RunPage", "RunShown", "EventShown", "CancelShown", "NewRun", "Grant"),
    *("ApprovalPage", "ApprovalShown", "BillList", "ResolveBill", "ErrorShown"),
    *(
        "GraphDiff",
        "GraphShown",
        "GraphVersion",
        "LayoutChange",
        "LayoutShown",
        "NodeTypes",
        "OfferedModels",
        "ToolList",
    ),
    *("Validity",),
    *("AgentPage", "AttachmentShown", "ChatPage", "ChatPath", "ChatShown", "NewAnswer", "NewMessage", "TurnShown"),
    *("RunEvent", "RunTree", "BudgetList", "GraphShown", "RunDiff", "CallPayload"),
    *("MoneyShown", "BudgetsOfDay", "PriceList", "BillPage", "Checkup", "SettingList", "HostShown", "Readiness"),
    *("TokenList", "NewToken", "CreatedToken", "SpendShown", "KeyRunList"),
)
"""Bodies that the UI sends or receives."""
HEADER = "// Written by `make ui-types` from the API's OpenAPI description. Do not edit.\n"
REF = "#/components/schemas/"
PRIMITIVES = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


async def description() -> Json:
    """Return the OpenAPI description of a server."""
    async with await open_stores("memory:") as stores:
        host = RunHost(stores)
        schema: Json = create_app(host, ChatService(host, stores.chats), stores).openapi()
        return schema


def typescript(api: Json) -> str:
    """Render the used bodies as TypeScript interfaces, by name."""
    schemas: Json = api["components"]["schemas"]
    names = sorted(_reachable(schemas))
    return HEADER + "".join(f"\n{_declaration(name, schemas[name])}" for name in names)


def _reachable(schemas: Json) -> set[str]:
    found: set[str] = set()
    pending = list(USED)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += _references(schemas[name])
    return found


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield schema["$ref"].removeprefix(REF)
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _declaration(name: str, schema: Json) -> str:
    if "properties" not in schema:
        return f"export type {name} = {_type(schema)};\n"
    required = schema.get("required", ())
    fields = "".join(
        f"  {field}{'' if field in required else '?'}: {_type(shape)};\n"
        for field, shape in schema["properties"].items()
    )
    return f"export interface {name} {{\n{fields}}}\n"


def _type(schema: Json) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(REF)
    if "const" in schema or "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " | ".join(dict.fromkeys(map(_type, schema[several])))
    kind = schema.get("type")
    if kind == "array":
        inner = _type(schema.get("items", {}))
        return f"({inner})[]" if "|" in inner else f"{inner}[]"
    if kind == "object":
        values = schema.get("additionalProperties", True)
        return f"Record<string, {_type(values) if isinstance(values, Mapping) else 'unknown'}>"
    return PRIMITIVES.get(str(kind), "unknown")


def main() -> None:
    """Write the file."""
    TYPES.write_text(typescript(asyncio.run(description())), "utf-8")
    print(f"wrote {TYPES}")


if __name__ == "__main__":
    main()
