"""The installed command as a process: signals, pipes, terminals and encodings.

A step says on standard error when it is where the test wants it; nothing here waits for time to pass.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WITH_A_FULL_DEVICE = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
PENSTOCK = [sys.executable, "-m", "penstock.cli"]

GRAPH = """
import asyncio, os, signal, sys, threading, time
from penstock.flow.graph import Graph
from penstock.flow.node import FunctionNode


async def quick(context):
    return "schnell ✓ 😀"


async def waits(context):
    print("WAITING", file=sys.stderr, flush=True)
    await asyncio.Event().wait()


async def stubborn(context):
    try:
        await waits(context)
    except BaseException:
        print("CALLED", file=sys.stderr, flush=True)
        await asyncio.Event().wait()


async def elsewhere(context):
    def hear():
        time.sleep(0.2)  # by then the loop sleeps
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    threading.Thread(target=hear, daemon=True).start()
    await asyncio.Event().wait()


async def noisy(context):
    os.write(1, b"to the descriptor\\\\n")
    os.system("echo from a program")
    return 1


def made(step):
    graph = Graph("process")
    graph.step(FunctionNode("quick", quick), "quick") >> graph.step(FunctionNode("then", step), "then")
    return graph


graph, waiting, hanging, talking = made(quick), made(waits), made(stubborn), made(noisy)
hearing = made(elsewhere)
"""


@pytest.fixture(autouse=True)
def flows(directory: Path) -> Path:
    path = directory / "flows.py"
    path.write_text(GRAPH.replace("\\\\n", "\\n"))
    return path


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*PENSTOCK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", **options
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stderr is not None
    read = ""
    for line in process.stderr:
        read += line
        if word in line:
            return read
    raise AssertionError(f"{word} was never printed: {read}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_shows_what_is_there_and_is_130(number: signal.Signals) -> None:
    with started("run", "flows.py:waiting") as process:
        until(process, "WAITING")
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 130
    assert out == "quick: schnell ✓ 😀\n"
    assert "■ cancelled: aborted: " in err
    assert "Traceback" not in err


def test_a_cancelled_run_still_prints_its_document() -> None:
    with started("run", "flows.py:waiting", "--json") as process:
        until(process, "WAITING")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    read = json.loads(out)
    assert (process.returncode, read["status"]) == (130, "cancelled")
    assert (read["results"], read["stop"]["message"]) == ({"quick": "schnell ✓ 😀"}, "Ctrl-C")


def test_a_signal_that_another_thread_received_is_heard_while_the_loop_sleeps() -> None:
    with started("run", "flows.py:hearing") as process:
        _, err = process.communicate()
    assert process.returncode == 130
    assert "cancelled: aborted: Ctrl-C" in err


def test_a_second_ctrl_c_leaves_at_once() -> None:
    with started("run", "flows.py:hanging") as process:
        until(process, "WAITING")
        process.send_signal(signal.SIGINT)
        until(process, "CALLED")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


def test_a_run_that_hangs_after_its_deadline_is_left_by_two_signals() -> None:
    with started("run", "flows.py:hanging", "--timeout", "0.05") as process:
        until(process, "CALLED")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 130


def test_ctrl_c_while_a_module_is_loaded_is_130(directory: Path) -> None:
    (directory / "slow.py").write_text(
        "import sys, threading\nprint('WAITING', file=sys.stderr, flush=True)\nthreading.Event().wait()\n"
    )
    with started("run", "slow.py") as process:
        until(process, "WAITING")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, err) == (130, "")


def test_only_results_reach_standard_output() -> None:
    ended = subprocess.run(
        [*PENSTOCK, "run", "flows.py:talking", "--json"], capture_output=True, text=True, encoding="utf-8", check=True
    )
    assert json.loads(ended.stdout)["status"] == "ok"
    assert "to the descriptor" in ended.stderr
    assert "from a program" in ended.stderr


@pytest.mark.parametrize("command", [["run", "flows.py"], ["graph", "schema"]], ids=str)
def test_a_reader_that_has_left_is_no_error(command: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run([*PENSTOCK, *command], stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr
    assert "Broken" not in ended.stderr


@WITH_A_FULL_DEVICE
@pytest.mark.parametrize("command", [["run", "flows.py"], ["run", "flows.py", "--json"], ["graph", "schema"]], ids=str)
def test_results_that_cannot_be_written_are_2_and_a_sentence(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*PENSTOCK, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.endswith("penstock: standard output cannot be written: No space left on device\n")
    assert "Traceback" not in ended.stderr


@WITH_A_FULL_DEVICE
@pytest.mark.parametrize("command", ["--help", "serve --help", "runs -h", "runs ls --help", "runs", "--version"])
def test_help_that_cannot_be_written_is_2_and_a_sentence(command: str) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*PENSTOCK, *command.split()], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    expected = "penstock: standard output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (2, expected)


@pytest.mark.parametrize(("closed", "name"), [("<&-", "standard input"), (">&-", "standard output")])
def test_an_mcp_server_without_a_stream_to_speak_on_is_64_and_a_sentence(closed: str, name: str) -> None:
    command = f"{sys.executable} -m penstock.cli mcp {closed}"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (64, 1)
    assert f"and {name} is closed" in ended.stderr


@WITH_A_FULL_DEVICE
def test_progress_that_cannot_be_written_changes_nothing() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*PENSTOCK, "run", "flows.py", "--json"], stdout=subprocess.PIPE, stderr=full, text=True, check=False
        )
    assert (ended.returncode, json.loads(ended.stdout)["status"]) == (0, "ok")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_from_the_start_change_no_exit_code(closed: str) -> None:
    command = f"{sys.executable} -m penstock.cli run flows.py {closed}"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_a_stream_cannot_encode_is_spelled_in_what_it_can(encoding: str) -> None:
    env = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    ended = subprocess.run([*PENSTOCK, "run", "flows.py"], capture_output=True, env=env, check=False)
    assert ended.returncode == 0
    assert ended.stdout.decode(encoding).startswith("quick: schnell + \\U0001f600\n")
    assert "+ completed" in ended.stderr.decode(encoding)
    ended = subprocess.run([*PENSTOCK, "run", "flows.py", "--json"], capture_output=True, env=env, check=True)
    assert json.loads(ended.stdout.decode(encoding))["results"]["quick"] == "schnell ✓ 😀"


def on_a_terminal(
    *arguments: str, columns: int = 100, rows: int = 30, on: dict[bytes, signal.Signals] | None = None, **env: str
) -> tuple[int, str, str]:
    """Exit code, standard output, and what a terminal as standard error was sent; `on` a word, send a signal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [*PENSTOCK, *arguments],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        encoding="utf-8",
        env=kept | {"TERM": "xterm-256color"} | env,
    )
    os.close(theirs)
    sent = b""
    with process:
        assert process.stdout is not None
        while piece := _read(ours):
            sent += piece
            for word in [word for word in on or {} if word in sent]:
                process.send_signal(on.pop(word))  # type: ignore[union-attr]
        out = process.stdout.read()
    os.close(ours)
    return process.returncode, out, sent.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65_536)
    except OSError:  # how Linux says that the other side has closed
        return b""


def test_on_a_terminal_the_tree_moves_and_the_results_stay_apart() -> None:
    code, out, sent = on_a_terminal("run", "flows.py", "--max-steps", "10")
    assert (code, out.splitlines()[0]) == (0, "quick: schnell ✓ 😀")
    assert "steps" in sent
    assert "of 10" in sent
    assert "\x1b[32m✓" in sent
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l")


def test_immediate_exit_restores_the_cursor() -> None:
    code, out, sent = on_a_terminal("run", "flows.py:hanging", on={b"WAITING": signal.SIGINT, b"CALLED": signal.SIGINT})
    assert (code, out) == (130, "")
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l")


def test_no_color_is_heard() -> None:
    _, _, sent = on_a_terminal("run", "flows.py", NO_COLOR="1")
    assert "\x1b[32m" not in sent
    assert "✓ then" in sent


def test_a_dumb_terminal_gets_plain_lines() -> None:
    _, _, sent = on_a_terminal("run", "flows.py", TERM="dumb")
    assert "\x1b" not in sent
    assert " s  call.ended         ✓ step quick\r\n" in sent
    assert " s  call.ended         ✓ step then\r\n" in sent


@pytest.mark.parametrize(("columns", "rows"), [(20, 5), (1, 1), (400, 100)])
def test_a_terminal_of_any_size_is_drawn_on(columns: int, rows: int) -> None:
    code, _, sent = on_a_terminal("run", "flows.py", "--max-cost", "1", columns=columns, rows=rows)
    assert (code, "Traceback" in sent) == (0, False)
