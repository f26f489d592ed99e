"""Exit codes of the commands, and the errors whose messages are shown to the user.

The code alone is enough for a script to distinguish a failed run from a halted or a cancelled one.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """All exit codes."""

    OK = 0
    FAILED = 2
    """The graph is not valid, or its run failed."""
    HALTED = 3
    """A limit, a hook or a breaker stopped the run."""
    WAITING = 4
    """A run waits for an answer that cannot be given here; it keeps waiting on the server."""
    USAGE = 64
    """The command line itself is wrong."""
    LOST = 75
    """The connection to the server was lost and not restored in time; the state of the run is unknown."""
    CANCELLED = 130


class Refused(Exception):
    """The command line requests something that cannot be done; the message is one sentence with what to do instead."""

    code = Exit.USAGE


class Broken(Refused):
    """Code that the command line names exists and fails when it is loaded."""

    code = Exit.FAILED


class WriteFailed(Refused):
    """The result is available and cannot be written to its destination."""

    code = Exit.FAILED


class Waiting(Refused):
    """A run has a question that cannot be answered here; the message says how to answer it."""

    code = Exit.WAITING


class Failed(Refused):
    """A server or a database failed or refused the request; the message says why."""

    code = Exit.FAILED


class NotFound(Failed):
    """The server has nothing with this id that the user may see."""


class Lost(Failed):
    """A server did not come back in time; the message says how to resume following the run."""

    code = Exit.LOST
