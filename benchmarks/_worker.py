"""One measurement in a process of its own: `python -m benchmarks._worker MODULE FUNCTION ARGUMENTS`.

Runs in a peer's environment too, where neither Penstock nor any other peer exists.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

MARK = "@@measured@@"


def main() -> None:
    module, function, arguments = sys.argv[1:]
    measured = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    print(MARK + json.dumps(measured), flush=True)
    # What a peer leaves running must not keep the others waiting.
    os._exit(0)


if __name__ == "__main__":
    main()
