"""Run one program of one contestant, in the contestant's environment.

python -m tools.prove.child CONTESTANT PROBE URL FOLDER ATTEMPT
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import inspect
import os
import platform
import sys
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tools.prove.site import Site, report

LINGER_S = 1.5
"""The process stays this long after its program, so that what the program left running can still be seen."""


def main(contestant: str, probe: str, url: str, folder: str, attempt: str) -> None:
    code = 0
    try:
        module = importlib.import_module(f"tools.prove.programs.{contestant}")
        version = getattr(module, "VERSION", "") or importlib.metadata.version(module.DISTRIBUTION)
        report("version", version=version, python=platform.python_version())
        program = getattr(module, probe)
        result = program(Site(url, Path(folder), int(attempt)))
        if inspect.iscoroutine(result):
            asyncio.run(_awaited(result))
        else:
            report("returned")
    except BaseException as error:
        # A program catches what its framework's limits raise. Anything else is a fault of the program or the harness.
        report("raised", text=" ".join(f"{type(error).__name__}: {error}".split())[:300])
        traceback.print_exc()
        code = 1
    time.sleep(LINGER_S)
    sys.stderr.flush()
    os._exit(code)  # a sync tool that was abandoned has a thread that blocks the exit


async def _awaited(work: Coroutine[Any, Any, None]) -> None:
    await work
    report("returned")
    await asyncio.sleep(LINGER_S)
    sys.stderr.flush()
    os._exit(0)  # the end of the loop would wait for threads of sync work, which a run may have abandoned


if __name__ == "__main__":
    main(*sys.argv[1:])
