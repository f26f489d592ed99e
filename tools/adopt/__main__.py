"""Drive every framework of `programs/` through the probes, and write what came out into docs/existing-code.md.

    python -m tools.adopt [NAME …]

Each framework has an environment of its own below build/adopt/, made on first use, with all extras of Penstock beside
it, so that an extra that needs what a framework forbids is noticed here. The programs run in a network
namespace that has nothing but a loopback interface, where the system allows one. Results of frameworks that are not
named are those of the last time; the page is written when every framework has one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from tools.adopt.judge import Verdict, judge, table
from tools.adopt.probes import Line
from tools.environments import ROOT, NotInstalled, environment, isolation, last_line, requirements, variables
from tools.pages import write_part

BUILD = ROOT / "build" / "adopt"
PAGE = ROOT / "docs" / "existing-code.md"
MAX_PROGRAM_S = 420

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

EXAMPLES = {"langgraph": "contained_langgraph.py", "crewai": "contained_crew.py"}
"""Programs of `examples/` that need a framework."""


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
    prefix = isolation()
    results = _read_results()
    failed = 0
    for name in names or FRAMEWORKS:
        print(f"{name} …", flush=True)
        results[name] = _drive(name, prefix)
        _write_results(results)
        if name in EXAMPLES and (problem := run_example(name, prefix)):
            failed += 1
            print(f"examples/{EXAMPLES[name]}: {problem}", flush=True)
    rendered = table({name: (results[name].lines, results[name].problem) for name in FRAMEWORKS if name in results})
    print(rendered)
    if missing := FRAMEWORKS.keys() - results.keys():
        print(f"{PAGE.name} stays as it is: {', '.join(sorted(missing))} have no results here yet")
    else:
        write_part(PAGE, "adopt", rendered)
    lines = [line for result in results.values() for line in result.lines]
    return int(bool(failed) or any(judge(line) in (Verdict.LEAKS, Verdict.LATE) for line in lines))


def run_example(name: str, prefix: list[str]) -> str:
    """Run the example of a framework in its environment; return what is wrong, or an empty string."""
    try:
        python = environment(BUILD / name, [*FRAMEWORKS[name], *requirements("all")])
    except NotInstalled as error:
        return f"not installed: {error}"
    home = BUILD / "home"
    command = [*prefix, str(python), str(ROOT / "examples" / EXAMPLES[name])]
    try:
        ended = subprocess.run(
            command, cwd=home, env=variables(home), capture_output=True, text=True, timeout=MAX_PROGRAM_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"did not end: {error}"
    if ended.returncode != 0:
        return f"exited {ended.returncode}: {last_line(ended.stdout + ended.stderr)}"
    return "the framework is missing" if "pip install" in ended.stdout else ""


def _drive(name: str, prefix: list[str]) -> Result:
    """Make the environment if it is not there, and run the program."""
    try:
        python = environment(BUILD / name, [*FRAMEWORKS[name], *requirements("all")])
    except NotInstalled as error:
        return Result(problem=f"not installed: {error}")
    home = BUILD / "home"
    env = variables(home, GOOGLE_API_KEY="none")
    command = [*prefix, str(python), "-m", f"tools.adopt.programs.{name}"]
    try:
        ended = subprocess.run(
            command, cwd=home, env=env, capture_output=True, text=True, timeout=MAX_PROGRAM_S, check=False
        )
        output, errors, problem = ended.stdout, ended.stderr, ""
    except subprocess.TimeoutExpired as error:
        output, errors, problem = _text(error.stdout), "", f"ended after {MAX_PROGRAM_S} s"
    lines = tuple(Line(**json.loads(line)) for line in output.splitlines() if line.startswith('{"framework"'))
    return Result(lines, problem or ("" if lines else f"did not run: {last_line(errors)}"))


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


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
