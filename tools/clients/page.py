"""Run the snippets of docs/gateway.md that need libraries of others, as they stand, against a `penstock gateway`.

    python -m tools.clients.page [NAME …]

A snippet is the text of the page, with the address and the key of this gateway in place of those that it shows. Where
it only makes clients, a call with each of them follows. A fake provider answers; it must have seen every call.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.testing.provider import FakeProviderServer
from tools.blocks import ROOT, blocks_of
from tools.clients.running import BUILD, node_packages, run_program
from tools.environments import NotInstalled, environment

PAGE = ROOT / "docs" / "gateway.md"
ADDRESS, KEY = "http://gateway:8643", "pen_…"
"""What the page shows."""
PENSTOCK = [sys.executable, "-m", "penstock.cli"]


@dataclass(frozen=True, slots=True)
class Snippet:
    """A block of the page that begins with this line, the packages it needs, and the calls made with its clients."""

    begins: str
    packages: tuple[str, ...]
    made: int
    """Number of calls that the provider must see."""
    calls: str = ""


SNIPPETS: Mapping[str, Snippet] = {
    "anthropic_google_python": Snippet(
        "import anthropic",
        ("anthropic", "google-genai"),
        2,
        'messages = [{"role": "user", "content": "hello"}]\n'
        'print(claude.messages.create(model="claude-sonnet-4-5", max_tokens=50, messages=messages).content[0].text)\n'
        'print(gemini.models.generate_content(model="gemini-2.5-flash", contents="hello").text)\n',
    ),
    "langchain_python": Snippet(
        "from langchain_openai import ChatOpenAI", ("langchain-openai",), 1, 'print(model.invoke("hello").content)\n'
    ),
    "litellm_python": Snippet("import litellm", ("litellm", "mcp", "tenacity"), 2),
    "openai_node": Snippet(
        'import OpenAI from "openai";',
        ("openai",),
        1,
        'const messages = [{ role: "user", content: "hello" }];\n'
        'const completion = await client.chat.completions.create({ model: "gpt-4o-mini", messages });\n'
        "console.log(completion.choices[0].message.content);\n",
    ),
    "anthropic_google_node": Snippet(
        'import Anthropic from "@anthropic-ai/sdk";',
        ("@anthropic-ai/sdk", "@google/genai"),
        2,
        'const messages = [{ role: "user", content: "hello" }];\n'
        'const message = await claude.messages.create({ model: "claude-sonnet-4-5", max_tokens: 50, messages });\n'
        "console.log(message.content[0].text);\n"
        'const answer = await gemini.models.generateContent({ model: "gemini-2.5-flash", contents: "hello" });\n'
        "console.log(answer.text);\n",
    ),
}


def texts() -> dict[str, str]:
    """Return the blocks of the page that are run here: their text, with the name of their snippet."""
    names = {snippet.begins: name for name, snippet in SNIPPETS.items()}
    kinds = [block for block in blocks_of(PAGE) if block.kind == "js" or (block.kind == "python" and block.not_run)]
    found = {block.text: names.get(block.text.partition("\n")[0]) for block in kinds}
    return {text: name for text, name in found.items() if name is not None}


def program(name: str, url: str, key: str) -> str:
    """Return the program of a snippet: the text of the page for this gateway, and the calls."""
    (text,) = [text for text, named in texts().items() if named == name]
    return text.replace(ADDRESS, url).replace(KEY, key) + SNIPPETS[name].calls


@contextmanager
def serving(provider: FakeProviderServer) -> Iterator[tuple[str, str]]:
    """Run `penstock gateway` before a provider; yield its address and a key."""
    with TemporaryDirectory() as folder:
        database = f"sqlite:///{folder}/penstock.db"
        created = [*PENSTOCK, "tokens", "create", "ann", "--gateway", "--daily", "5", "--db", database]
        key = subprocess.run(created, check=True, capture_output=True, text=True).stdout.strip()
        upstreams = {
            "OPENAI_BASE_URL": provider.openai_url,
            "ANTHROPIC_BASE_URL": provider.url,
            "GOOGLE_GEMINI_BASE_URL": provider.url,
            **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GOOGLE_API_KEY"), "sk-of-the-provider"),
        }
        command = [*PENSTOCK, "gateway", "--port", "0", "--db", database]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | upstreams) as gateway:
            assert gateway.stderr is not None
            try:
                yield gateway.stderr.readline().rpartition(" ")[2].strip(), key
            finally:
                gateway.terminate()
                gateway.stderr.read()  # what it prints at its end


def run(name: str) -> bool:
    """Run a snippet in its environment; return whether the provider saw its calls."""
    snippet, label = SNIPPETS[name], f"page/{name}"
    with FakeProviderServer() as provider, serving(provider) as (url, key):
        if (command := _command(name, label, program(name, url, key))) is None:
            return False
        printed = run_program(label, command, {})
        return printed is not None and len(provider.requests) == snippet.made


def _command(name: str, label: str, text: str) -> list[str] | None:
    packages = SNIPPETS[name].packages
    try:
        if name.endswith("_node"):
            interpreter, file = Path("node"), node_packages(label, packages) / "program.mjs"
        else:
            interpreter, file = environment(BUILD / label, packages), BUILD / label / "program.py"
    except (OSError, subprocess.SubprocessError, NotInstalled) as error:
        print(f"{label}: not run: {getattr(error, 'stderr', None) or error}")
        return None
    file.write_text(text, "utf-8")
    return [str(interpreter), str(file)]


def main(names: list[str]) -> int:
    if unknown := set(names) - SNIPPETS.keys():
        print(f"no such snippet: {', '.join(sorted(unknown))}; there are {', '.join(SNIPPETS)}")
        return 2
    failed = [name for name in names or SNIPPETS if not run(name)]
    print("all snippets of the page passed" if not failed else f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
