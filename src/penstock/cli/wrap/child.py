"""A child process with a process group of its own, and the terminal if there is one.

The group is signalled and ended as a whole: the program, and every process that it started and did not detach. With a
terminal, the group is its foreground, as in a shell: Ctrl-C and Ctrl-Z reach the program first. On Linux, this process
adopts the processes that the program leaves behind, so that none of the group is left when it has ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from penstock.cli.exits import Refused

POLL_INTERVAL_S = 0.02
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
SIGNAL_EXIT = 128
"""Exit code of a program that a signal ended: this, plus the number of the signal."""
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


class CannotRun(Refused):
    """The program cannot be started; the exit codes are the same as in a shell."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[assignment]  # a shell's code, which is not an Exit


def harden_process() -> None:
    """Keep other programs of the user from reading this process's memory and environment, where the system can."""
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Child:
    """A running program and its process group."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._group = process.pid
        self._terminal = _terminal()

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start the program; raise CannotRun if there is none, or it cannot be executed."""
        try:
            process = await asyncio.create_subprocess_exec(*command, env=environment, process_group=0)
        except FileNotFoundError:
            raise CannotRun(f"there is no command {command[0]!r}", 127) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise CannotRun(f"{command[0]!r} cannot be executed: {reason}", 126) from None
        return cls(process)

    async def wait(self) -> int:
        """Wait for the end of the program; return its exit code as a shell reports it."""
        code = await self._process.wait()
        return code if code >= 0 else SIGNAL_EXIT - code

    def send(self, number: int) -> None:
        """Send a signal to the whole group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._group, number)

    async def end(self, grace_s: float) -> None:
        """End the group: ask it to terminate, and kill the rest of it after the grace period."""
        if not self._is_there():
            return
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)  # a stopped process would not notice
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._gone()
        self.send(signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._gone()

    async def _gone(self) -> None:
        while self._is_there():  # noqa: ASYNC110  nothing signals the end of a group
            await asyncio.sleep(POLL_INTERVAL_S)

    def _is_there(self) -> bool:
        if self._process.returncode is not None:
            self._reap_adopted()
        try:
            os.killpg(self._group, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def _reap_adopted(self) -> None:
        """Reap the processes that the program has left behind and this process has adopted."""
        with suppress(ChildProcessError):
            while os.waitpid(-self._group, os.WNOHANG)[0]:
                pass

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Forward signals to the group inside the block, and let it use the terminal."""
        loop = asyncio.get_running_loop()
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else taking the terminal back would stop this process
        for number in FORWARDED:
            loop.add_signal_handler(number, self.send, number)
        loop.add_signal_handler(signal.SIGCHLD, self._follow_stop)
        self._give_terminal()
        try:
            yield
        finally:
            for number in (*FORWARDED, signal.SIGCHLD):
                loop.remove_signal_handler(number)
            self._take_terminal()
            signal.signal(signal.SIGTTOU, before)

    def _give_terminal(self) -> None:
        if self._terminal is not None and os.tcgetpgrp(self._terminal) == os.getpgrp():
            with suppress(OSError):
                os.tcsetpgrp(self._terminal, self._group)
                self.send(signal.SIGCONT)  # it may have read before it had the terminal

    def _take_terminal(self) -> None:
        if self._terminal is not None:
            with suppress(OSError):
                os.tcsetpgrp(self._terminal, os.getpgrp())

    def _follow_stop(self) -> None:
        """Stop with the program when Ctrl-Z stops it, so that the shell gets its terminal; continue with it."""
        with suppress(ChildProcessError):
            stopped = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG)
            if stopped is not None and self._terminal is not None:
                self._take_terminal()
                os.kill(os.getpid(), signal.SIGSTOP)
                self._give_terminal()
                self.send(signal.SIGCONT)


def _terminal() -> int | None:
    """Return the terminal that this process controls, if its input is one."""
    try:
        return 0 if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp() else None
    except OSError:
        return None
