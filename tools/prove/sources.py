"""The programs of `programs/`, read and not imported: each needs an environment of its own."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.prove.probes import PROBES

FOLDER = Path(__file__).parent / "programs"


@dataclass(frozen=True, slots=True)
class Sources:
    """The programs of one contestant as text."""

    shared: str
    """What all its programs use: imports and functions that are no probe."""
    programs: Mapping[str, str]
    not_applicable: Mapping[str, str]

    def fingerprint(self, probe: str) -> str:
        """Return what changes when the program of this probe does, or what it uses."""
        return hashlib.sha256(f"{self.shared}\n{self.programs[probe]}".encode()).hexdigest()[:16]


def sources(contestant: str, folder: Path = FOLDER) -> Sources:
    """Read the programs of a contestant."""
    text = (folder / f"{contestant}.py").read_text("utf-8")
    shared: list[str] = []
    programs: dict[str, str] = {}
    not_applicable: dict[str, str] = {}
    for node in ast.parse(text).body:
        part = "\n".join(text.splitlines()[_first_line(node) - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in PROBES:
            programs[node.name] = part
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "NOT_APPLICABLE" and node.value:
            not_applicable = ast.literal_eval(node.value)
        else:
            shared.append(part)
    return Sources("\n\n".join(shared), programs, not_applicable)


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min(node.lineno, *(decorator.lineno for decorator in decorators)) if decorators else node.lineno
