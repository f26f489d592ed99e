"""Drive every framework of `programs/` through the probes, and write what came out into docs/existing-code.md.

    python -m tools.adopt [NAME …]

Each framework has an environment of its own below build/adopt/, made on first use. The programs run in a network
namespace that has nothing but a loopback interface, where the system allows one. Results of frameworks that are not
named are those of the last time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.adopt.judge import Verdict, judge, table
from tools.adopt.probes import Line

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "adopt"
PAGE = ROOT / "docs" / "existing-code.md"
BEGIN, END = "<!-- adopt: begin -->", "<!-- adopt: end -->"
MAX_PROGRAM_S = 420
MAX_INSTALL_S = 900
PENSTOCK_NEEDS = ("pydantic>=2.10", "httpx2>=2.16")

FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "langgraph": ("langgraph", "langchain", "langchain-openai"),
    "pydantic_ai": ("pydantic-ai-slim[openai]",),
    "openai_agents": ("openai-agents",),
    "agno": ("agno", "openai"),
    "smolagents": ("smolagents[openai]",),
    "crewai": ("crewai",),
    "llamaindex": (
        "llama-index-core",
        "llama-index-llms-openai-like",
        "llama-index-embeddings-openai",
    ),
    "dspy": ("dspy", "numpy"),
    "litellm": ("litellm",),
    "google_genai": ("google-genai",),
    "adk": ("google-adk",),
    "instructor": ("instructor",),
    "agent_framework": ("agent-framework-core", "agent-framework-openai"),
    "autogen": ("autogen-agentchat", "autogen-ext[openai,chromadb]"),
}
"""The packages of each program's environment."""

QUIET = {
    "AGNO_TELEMETRY": "false",
    "ANONYMIZED_TELEMETRY": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}
"""Switches off what the frameworks report to their makers."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one program printed, or why it could not."""

    lines: tuple[Line, ...] = ()
    problem: str = ""


def main(names: list[str]) -> int:
    unknown = set(names) - FRAMEWORKS.keys()
    if unknown:
        print(f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(FRAMEWORKS)}")
        return 2
    prefix = _isolation()
    if not prefix:
        print("warning: no network namespace here; telemetry is switched off by environment variables alone")
    results = _read_results()
    for name in names or FRAMEWORKS:
        print(f"{name} …", flush=True)
        results[name] = _drive(name, prefix)
        _write_results(results)
    rendered = table({name: (results[name].lines, results[name].problem) for name in FRAMEWORKS if name in results})
    print(rendered)
    _write_page(rendered)
    lines = [line for result in results.values() for line in result.lines]
    return int(any(judge(line) in (Verdict.LEAKS, Verdict.LATE) for line in lines))


def _drive(name: str, prefix: list[str]) -> Result:
    """Make the environment if it is not there, and run the program."""
    try:
        python = _environment(name)
    except subprocess.SubprocessError as error:
        output = getattr(error, "stderr", None) or str(error)
        return Result(problem=f"not installed: {_last_line(output)}")
    home = BUILD / "home"
    home.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key in ("PATH", "LANG", "TMPDIR") if (value := os.environ.get(key)) is not None}
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = {**kept, **QUIET, "HOME": str(home), "PYTHONPATH": paths, "OPENAI_API_KEY": "none", "GOOGLE_API_KEY": "none"}
    command = [*prefix, str(python), "-m", f"tools.adopt.programs.{name}"]
    try:
        ended = subprocess.run(
            command, cwd=home, env=env, capture_output=True, text=True, timeout=MAX_PROGRAM_S, check=False
        )
        output, errors, problem = ended.stdout, ended.stderr, ""
    except subprocess.TimeoutExpired as error:
        output, errors, problem = _text(error.stdout), "", f"ended after {MAX_PROGRAM_S} s"
    lines = tuple(Line(**json.loads(line)) for line in output.splitlines() if line.startswith('{"framework"'))
    return Result(lines, problem or ("" if lines else f"did not run: {_last_line(errors)}"))


def _environment(name: str) -> Path:
    """Return the interpreter of the environment; make it if its packages are not those that it was made for."""
    folder, packages = BUILD / name, [*FRAMEWORKS[name], *PENSTOCK_NEEDS]
    python, stamp = folder / "bin" / "python", folder / "packages.txt"
    if stamp.exists() and stamp.read_text().split() == packages:
        return python
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
    for command in (
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "--quiet", "--python", str(python), *packages],
    ):
        subprocess.run(["nice", *command], check=True, capture_output=True, text=True, timeout=MAX_INSTALL_S)
    stamp.write_text("\n".join(packages))
    return python


def _isolation() -> list[str]:
    """Return the command that runs another one with a loopback interface and no other; empty if it cannot be had."""
    prefix = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec nice "$@"', "sh"]
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return []
    return prefix


def _read_results() -> dict[str, Result]:
    try:
        known = json.loads((BUILD / "results.json").read_text())
    except FileNotFoundError:
        return {}
    return {
        name: Result(tuple(Line(**line) for line in result["lines"]), result["problem"])
        for name, result in known.items()
    }


def _write_results(results: dict[str, Result]) -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: asdict(result) for name, result in results.items()}, indent=1)
    (BUILD / "results.json").write_text(text)


def _write_page(rendered: str) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{rendered}\n{END}{after}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
