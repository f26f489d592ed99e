"""Run a function in a process of its own, which a cancel, a timeout or a deadline really ends.

Only JSON crosses the boundary: the name of the function, its input and the earlier results go through the child's
stdin, its value comes back through a separate pipe, so that whatever it prints goes where the parent's output goes.

**Ending.** The child leads a process group, and every stop kills the group: a cancel of the token immediately, in the
cancelling thread; a caller that left for another reason within `SLICE_S`. A kill before the process exists is
remembered. The child is reaped last, under a lock: until then its pid is not reused, and afterwards nothing is killed.
When the parent is gone for any reason, the child's stdin ends: a thread of the child waits for that, and so does the
kernel's SIGIO, which also ends a function that never releases the interpreter.

This is the parent's side; the child runs `isolated_child` as a script.

Not known here: graphs, limits, costs. A process that the function has moved to another session is not ended with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import CancelledError, InvalidValue, PenstockError
from penstock.flow import isolated_child
from penstock.flow.isolated_child import MAIN, MAX_BYTES, PREFIX, NotJSON, to_json, write_message
from penstock.tracing.record import OPEN

if TYPE_CHECKING:
    from penstock.runtime.call import Call
    from penstock.runtime.context import ExecutionContext

CHILD = os.path.abspath(isolated_child.__file__)
SLICE_S = 0.1
"""Interval at which the parent checks whether its caller still waits for the child."""


class IsolatedError(PenstockError):
    """A function in a process of its own raised, died or returned no JSON; its error is known by name and text."""

    def __init__(
        self,
        step: str,
        what: str,
        *,
        error_class: str | None = None,
        message: str | None = None,
        traceback: str | None = None,
        exit_code: int | None = None,
        signal: int | None = None,
    ) -> None:
        self.step = step
        self.error_class = error_class
        """Name of the class of the function's error; None if it raised none."""
        self.message = message
        self.traceback = traceback
        """The error as the child would have printed it."""
        self.exit_code = exit_code
        """Exit code of a process that ended without an answer."""
        self.signal = signal
        """Signal that killed such a process; None if it ended by itself."""
        super().__init__(f"step {step!r} in a process of its own {what}")
        if traceback:
            self.add_note(traceback)


@dataclass(frozen=True, slots=True)
class Address:
    """The location of a function for another process: in a module, or in the script `file`."""

    module: str
    file: str | None
    qualname: str

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.qualname}"


def isolated(fn: Callable[..., Any], node_id: str) -> Callable[[ExecutionContext], Any]:
    """Return a function that runs the node's function in a process of its own and waits for it."""
    address = address_of(fn, node_id)

    def run(context: ExecutionContext) -> Any:
        return _run(address, node_id, context)

    return run


def address_of(fn: Callable[..., Any], node_id: str) -> Address:
    """Return the location of `fn` for another process; raises InvalidValue if it has none."""
    if not hasattr(os, "killpg") or not sys.executable:
        raise InvalidValue(f"isolation of node {node_id!r}", "process", "left out where processes have no groups")
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str) or "<" in qualname:
        raise _unfindable(fn, node_id)
    found: Any = sys.modules.get(module)
    spec = getattr(found, "__spec__", None)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    if found is not fn:
        raise _unfindable(fn, node_id)
    if spec is not None and module != MAIN:  # of `python -m name`, it has the name that `__main__` stands for
        return Address(str(spec.name), None, qualname)
    file = getattr(sys.modules[module], "__file__", None)
    if module not in ("__main__", MAIN) or not file:
        raise _unfindable(fn, node_id)
    return Address(MAIN, os.path.abspath(file), qualname)


def _unfindable(fn: object, node_id: str) -> InvalidValue:
    return InvalidValue(
        f"fn of node {node_id!r}",
        fn,
        "a function at the top level of a module that can be imported, because with isolation='process' another "
        "process has to find it by its name (no lambda, closure, method or partial; pass what it needs as input)",
    )


def _run(address: Address, node_id: str, context: ExecutionContext) -> Any:
    call = context._call_here()
    step = node_id if call is None else call.record.name
    _refuse_while_loading(step)
    token = context.cancellation
    token.check()
    process = Process(step)

    def is_over() -> bool:
        return token.is_cancelled or (call is not None and call.record.end_seq != OPEN)

    request = _request(address, context, step)
    forget = token.add_callback(process.kill)
    try:
        answer = process.ask(request, is_over)
    finally:
        forget()
    if answer is None:
        raise _why_there_is_none(process, context, call)
    return _value_of(answer, step)


def _refuse_while_loading(step: str) -> None:
    """Refuse to start while the script is imported: a script that runs its graph on import would create children
    forever.
    """
    main = sys.modules.get("__main__")
    if os.path.realpath(getattr(main, "__file__", None) or "") == os.path.realpath(CHILD):
        being_loaded = getattr(main, "loading", None)
        if being_loaded is not None:
            expected = "one that runs its graphs under `if __name__ == '__main__':`, because a child imports it"
            raise InvalidValue(f"script of step {step!r}", being_loaded, expected)


def _request(address: Address, context: ExecutionContext, step: str) -> bytes:
    try:
        input = to_json(context.input, "input")
    except NotJSON as flaw:
        expected = f"JSON, to get to a process of its own ({flaw})"
        raise InvalidValue(f"input of step {step!r}", context.input, expected) from None
    sent: list[str] = []
    unsent: dict[str, str] = {}
    # A list of the names first: while this thread writes, other steps may finish.
    for name in list(context.upstream):
        try:
            sent.append(f"{json.dumps(str(name))}:{to_json(context.upstream[name], 'result')}")
        except NotJSON as flaw:
            unsent[name] = str(flaw)
    about = {
        "path": sys.path,
        "argv": sys.argv,
        "module": address.module,
        "file": address.file,
        "qualname": address.qualname,
        "unsent": unsent,
    }
    text = f'{json.dumps(about, default=str)[:-1]},"input":{input},"upstream":{{{",".join(sent)}}}}}'
    return text.encode()


def _value_of(answer: bytes, step: str) -> Any:
    try:
        message = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise IsolatedError(step, f"sent a message that cannot be read: {error}") from None
    if "value" in message:
        return message["value"]
    if "flaw" in message:
        raise IsolatedError(step, f"returned a value that is not JSON: {message['flaw']}")
    raised = message["raised"]
    what = f"raised {raised['class']}: {raised['message']}"
    raise IsolatedError(
        step, what, error_class=raised["class"], message=raised["message"], traceback=raised["traceback"]
    )


def _why_there_is_none(process: Process, context: ExecutionContext, call: Call | None) -> BaseException:
    """Return the error for a process that ended without an answer."""
    if process.killed:
        stop = context.cancellation.stop or (None if call is None else call.stop)
        return CancelledError("its caller stopped waiting" if stop is None else stop.message, stop=stop)
    code = process.exit_code
    if code is None or code >= 0:
        return IsolatedError(process.step, f"ended without a value, with exit code {code}", exit_code=code)
    return IsolatedError(process.step, f"was ended by {_signal_name(-code)}", exit_code=code, signal=-code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Process:
    """One child: receives one request, can be killed from any thread, is always reaped."""

    def __init__(self, step: str) -> None:
        self.step = step
        self.killed = False
        """Whether the parent stopped it."""
        self.exit_code: int | None = None
        """Exit code; negative if a signal ended it, None until it has ended."""
        self._popen: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()
        """Held while the pid is used, which stays valid until the child is reaped. Reentrant, for signal handlers."""

    def kill(self) -> None:
        """End the process and everything it has started; if it has not started yet, as soon as it has."""
        with self._lock:
            self.killed = True
            self._kill_group()

    def ask(self, request: bytes, is_over: Callable[[], bool]) -> bytes | None:
        """Start the process, send `request`, return the answer, end it; None if it ended, or `is_over`, before that."""
        if self.killed:
            return None
        answers, its_end = os.pipe()
        try:
            try:
                self._start(its_end)
            finally:
                os.close(its_end)
            self._send(request)
            return self._receive(answers, is_over)
        finally:
            os.close(answers)
            self._end()

    def _start(self, answer_fd: int) -> None:
        command = [sys.executable, "-P", CHILD, str(answer_fd)]
        try:
            popen = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, pass_fds=(answer_fd,), start_new_session=True
            )
        except OSError as error:
            raise IsolatedError(self.step, f"could not be started: {error}") from error
        with self._lock:
            self._popen = popen
            if self.killed:
                self._kill_group()

    def _send(self, request: bytes) -> None:
        assert self._popen is not None
        assert self._popen.stdin is not None
        # It reads all of this before it does anything else. If it is dead, its exit code says more than the pipe.
        with suppress(BrokenPipeError):
            write_message(self._popen.stdin.fileno(), request)

    def _receive(self, answers: int, is_over: Callable[[], bool]) -> bytes | None:
        got, wanted, has_ended = bytearray(), PREFIX, False
        poller = select.poll()
        poller.register(answers, select.POLLIN)
        while len(got) < wanted:
            if poller.poll(0 if has_ended else SLICE_S * 1_000):
                piece = os.read(answers, 1 << 20)
                if not piece:
                    self._wait(is_over)
                    return None
                got += piece
                if len(got) >= PREFIX:
                    wanted = PREFIX + self._checked(int.from_bytes(got[:PREFIX], "big"))
            elif has_ended:  # and all it wrote is read: another process has the pipe open
                return None
            else:
                has_ended = self._has_ended()
                if not has_ended and is_over():
                    self.kill()
        return bytes(got[PREFIX:wanted])

    def _checked(self, size: int) -> int:
        if size > 2 * MAX_BYTES:
            raise IsolatedError(self.step, f"returned {size} bytes of JSON, more than the maximum")
        return size

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Wait after it has closed its end of the pipe, usually because it is about to end."""
        pause_s = 0.000_5
        while not self._has_ended():
            if is_over():
                self.kill()
            time.sleep(pause_s)
            pause_s = min(SLICE_S, pause_s * 2)

    def _has_ended(self) -> bool:
        """Whether it has ended; it stays unreaped where that is possible."""
        assert self._popen is not None
        if not hasattr(os, "waitid"):  # macOS, before Python 3.13
            return self._popen.poll() is not None
        return _wait_without_reaping(self._popen.pid, os.WNOHANG)

    def _end(self) -> None:
        if self._popen is None:
            return
        with self._lock:
            self._kill_group()
        if hasattr(os, "waitid"):  # so that a cancel meanwhile does not wait for the lock until it is dead
            _wait_without_reaping(self._popen.pid, 0)
        with self._lock:
            self._kill_group()  # what it had started is in the group as long as there is one
            self.exit_code = self._popen.wait()
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def _kill_group(self) -> None:
        if self._popen is not None and self.exit_code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)


def _wait_without_reaping(pid: int, options: int) -> bool:
    """Whether the process has ended; it is not reaped, so its pid is not reused."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | options) is not None
    except ChildProcessError:  # other code waits for every child of this program, and was quicker
        return True
