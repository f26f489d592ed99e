"""`import penstock` costs little and brings nothing but the standard library."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

MEASURE = """
import json, sys, time
before, start = set(sys.modules), time.process_time()
{statement}
cpu_ms = (time.process_time() - start) * 1000
print(json.dumps({{"cpu_ms": cpu_ms, "modules": sorted(set(sys.modules) - before)}}))
"""


def measure(statement: str) -> dict[str, Any]:
    code = MEASURE.format(statement=statement)
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(shown.stdout)
    return result


@pytest.mark.parametrize(
    "statement",
    [
        "import penstock",
        "import penstock; penstock.ExecutionContext",
        "from penstock import *",
        "from penstock.events import *",
        "from penstock.export import *",
        "from penstock.executors import *",
        "import penstock.stores",
    ],
)
def test_only_the_standard_library_is_imported(statement: str) -> None:
    roots = {name.partition(".")[0] for name in measure(statement)["modules"]}
    assert roots - sys.stdlib_module_names == {"penstock"}


def test_the_import_takes_less_than_100_ms_of_cpu() -> None:
    assert min(measure("import penstock")["cpu_ms"] for _ in range(5)) < 100
