"""A forked program is what the interpreter would have made of its arguments."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.forked import Program

pytestmark = pytest.mark.usefixtures("forks")


def test_it_has_its_own_arguments_environment_directory_streams_and_exit_code(tmp_path: Path) -> None:
    text = "import os, sys; print(sys.argv, os.environ, os.getcwd()); print('no', file=sys.stderr); sys.exit(7)"
    with Program(["-c", text, "a"], env={"ONLY": "this"}, cwd=tmp_path) as program:
        out, err = program.communicate()
    assert out == f"['-c', 'a'] environ({{'ONLY': 'this'}}) {tmp_path}\n"
    assert (err, program.returncode) == ("no\n", 7)


def test_a_file_and_a_module_are_the_main_program(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'found'\n")
    (tmp_path / "mine.py").write_text("import beside, sys\nprint(__name__, beside.word, sys.argv[1:])\n")
    for arguments in ([str(tmp_path / "mine.py"), "x"], ["-m", "mine", "x"]):
        with Program(arguments, cwd=tmp_path) as program:
            assert program.communicate() == ("__main__ found ['x']\n", "")
        assert program.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_it_as_they_end_an_interpreter(number: signal.Signals) -> None:
    with Program(["-c", "print('up', flush=True); import threading; threading.Event().wait()"]) as program:
        assert program.stdout.readline() == "up\n"
        program.send_signal(number)
        assert program.wait() == -number


def test_it_waits_for_its_threads_and_calls_what_was_registered_for_its_end() -> None:
    text = "import atexit, threading; atexit.register(print, 'end'); threading.Timer(0.01, print, ['late']).start()"
    with Program(["-c", text]) as program:
        assert program.communicate() == ("late\nend\n", "")


def test_an_error_is_a_traceback_and_1() -> None:
    with Program(["-c", "raise ValueError('broken')"], is_merged=True) as program:
        assert "ValueError: broken" in program.communicate()[0]
    assert program.returncode == 1
