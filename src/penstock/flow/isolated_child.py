"""The child of `isolation`: one function in a process of its own.

Run as a script that imports nothing of Penstock, because every call pays for its imports. The parent imports from here
what both sides share: what counts as JSON, and the format of messages.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator

TYPE_CHECKING = False  # of `typing`, which would be the child's largest import
if TYPE_CHECKING:
    from typing import Any, NoReturn

MAX_BYTES = 256 * 1024 * 1024
"""Maximum size of an input or a value, as JSON."""
MAX_DEPTH = 500
PREFIX = 8
"""Size of the length that precedes each message."""
MAIN = "__isolated_main__"
"""Name of the parent's script in the child: not `__main__`, so that it does not run again."""

loading: str | None = None
"""In the child: what is being imported to find the function."""


# Both sides: what is JSON.


class NotJSON(ValueError):
    """A value would change if it were written as JSON and read again."""


def to_json(value: Any, name: str) -> str:
    """Return `value` as JSON; raises NotJSON, which names the place. A tuple counts as a list."""
    try:
        text = json.dumps(value, allow_nan=False)
    except Exception as error:  # RecursionError, and whatever a class of the user's raises
        raise NotJSON(_flaw(value, name) or f"{name}: {error}") from None
    # json.dumps makes text of keys that are numbers, without a word.
    if not _has_text_keys(value):
        raise NotJSON(_flaw(value, name) or f"{name} has keys that are not text")
    if len(text) > MAX_BYTES:
        raise NotJSON(f"{name} has {len(text)} bytes of JSON; the maximum is {MAX_BYTES}")
    return text


def _has_text_keys(value: Any) -> bool:
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            if not all(isinstance(key, str) for key in one):
                return False
            todo += [inner for inner in one.values() if isinstance(inner, (dict, list, tuple))]
        elif isinstance(one, (list, tuple)):
            todo += [inner for inner in one if isinstance(inner, (dict, list, tuple))]
    return True


def _flaw(value: Any, name: str) -> str | None:
    """Return the first part of `value` that is not JSON, and its place."""
    todo = [(name, value, 0)]
    while todo:
        where, one, depth = todo.pop()
        if depth > MAX_DEPTH:
            return f"{name} is nested more than {MAX_DEPTH} deep, or contains itself"
        if isinstance(one, dict):
            for key in one:
                if not isinstance(key, str):
                    return f"{where} has the key {key!r}, which is not text"
            todo += [(f"{where}[{key!r}]", inner, depth + 1) for key, inner in one.items()]
        elif isinstance(one, (list, tuple)):
            todo += [(f"{where}[{at}]", inner, depth + 1) for at, inner in enumerate(one)]
        elif isinstance(one, float):
            if one - one != 0.0:  # infinite, or not a number
                return f"{where} is {one}"
        elif one is not None and not isinstance(one, (str, int)):
            return f"{where} is a {type(one).__name__}"
    return None


# The child.


class NotSent(LookupError):
    """A result of an earlier step is not JSON, so it was not sent to the process."""


class Unsent:
    """Stands for a result that could not be sent."""

    def __init__(self, step: str, why: str) -> None:
        self.error = NotSent(f"the result of step {step!r} did not come along: it is not JSON ({why})")


class Upstream(dict[str, "Any"]):
    """The results of earlier steps; reading one that could not be sent raises NotSent with the reason."""

    def __init__(self, sent: dict[str, Any], unsent: dict[str, str]) -> None:
        super().__init__(sent)
        self.update((step, Unsent(step, why)) for step, why in unsent.items())

    def __getitem__(self, step: str) -> Any:
        value = super().__getitem__(step)
        if type(value) is Unsent:
            raise value.error
        return value

    def __iter__(self) -> Iterator[str]:  # so that `dict(upstream)` and `{**upstream}` read item by item
        return super().__iter__()

    def get(self, step: str, default: Any = None) -> Any:
        return self[step] if super().__contains__(step) else default

    def values(self) -> Any:
        return [self[step] for step in self]

    def items(self) -> Any:
        return [(step, self[step]) for step in self]

    def __repr__(self) -> str:
        return f"<results of {', '.join(self)}>"


class IsolatedContext:
    """The context of a function in a process of its own: `input`, `upstream` and `check_cancelled`."""

    __slots__ = ("input", "upstream")

    def __init__(self, input: Any, upstream: dict[str, Any]) -> None:
        self.input = input
        self.upstream = upstream

    def check_cancelled(self) -> None:
        """Do nothing: a cancel ends the process."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"ctx.{name} is not available in an isolated step, whose ctx has input, upstream and check_cancelled; "
            "make calls in a step without isolation, or return what they need"
        )


def serve(answer_fd: int) -> NoReturn:
    """Serve one request with one answer; the whole life of the child."""
    control = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.set_inheritable(answer_fd, False)
    request = _read_message(control)
    if request is None:
        os._exit(1)
    _end_with_the_parent(control)
    answer = _answer(request).encode()
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105  contextlib would be one more import
            stream.flush()
        except Exception:  # closed, replaced or full: that is no reason to lose the value
            pass
    write_message(answer_fd, answer)
    os._exit(0)


def _read_message(fd: int) -> bytes | None:
    """Return the next message; None if the writer is gone."""
    wanted, got = PREFIX, bytearray()
    while len(got) < wanted:
        piece = os.read(fd, min(wanted - len(got), 1 << 20))
        if not piece:
            return None
        got += piece
        if len(got) == PREFIX == wanted:
            wanted += int.from_bytes(got, "big")
    return bytes(got[PREFIX:])


def write_message(fd: int, message: bytes) -> None:
    """Write all of it, in as many writes as it takes."""
    left = memoryview(len(message).to_bytes(PREFIX, "big") + message)
    while left:
        left = left[os.write(fd, left) :]


def _end_with_the_parent(control: int) -> None:
    """End when the parent is gone. Nothing more is written to `control`, so the next thing to read is its end."""
    import _thread

    def watch() -> None:
        try:
            while os.read(control, 1):
                pass
        finally:
            os.killpg(os.getpgrp(), 9)

    try:
        import fcntl

        # By default SIGIO ends the process that gets it: here, every process of the group.
        fcntl.fcntl(control, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) | os.O_ASYNC)
    except (ImportError, AttributeError, OSError):
        pass  # then the thread is all there is
    _thread.start_new_thread(watch, ())


def _answer(message: bytes) -> str:
    try:
        request = json.loads(message)
        sys.path[:], sys.argv[:] = request["path"], request["argv"]
        fn = _find(request["module"], request["file"], request["qualname"])
        upstream, unsent = request["upstream"], request["unsent"]
        value = fn(IsolatedContext(request["input"], Upstream(upstream, unsent) if unsent else upstream))
    except BaseException as error:  # also SystemExit: the parent decides what becomes of the step
        return json.dumps({"raised": _raised(error)})
    try:
        return f'{{"value":{to_json(value, "value")}}}'
    except NotJSON as flaw:
        return json.dumps({"flaw": str(flaw)})


def _find(module: str, file: str | None, qualname: str) -> Callable[[IsolatedContext], Any]:
    """Import the module, or run the script under another name, and return the function."""
    global loading
    import importlib

    loading = file or module
    try:
        found: Any = importlib.import_module(module) if file is None else _run_script(file)
    finally:
        loading = None
    for name in qualname.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _run_script(file: str) -> Any:
    from importlib import util

    spec = util.spec_from_file_location(MAIN, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {file}")
    sys.modules[MAIN] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _raised(error: BaseException) -> dict[str, str]:
    import traceback

    try:
        message = str(error)
    except Exception:
        message = "<its message cannot be shown>"
    # Without the frame that called the function.
    inside = error.__traceback__.tb_next if error.__traceback__ is not None else None
    try:
        text = "".join(traceback.format_exception(type(error), error, inside))
    except Exception:
        text = "<its traceback cannot be shown>"
    return {"class": type(error).__name__, "message": message[:10_000], "traceback": text[-100_000:]}


if __name__ == "__main__":
    serve(int(sys.argv[1]))
