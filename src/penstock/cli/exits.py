"""How a command ends: the exit codes, and the errors that people are to read.

A script tells by the code alone whether a run failed, ran into a limit or was cancelled.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Every exit code there is."""

    OK = 0
    FAILED = 2
    """The graph is not valid, or what it runs has failed."""
    HALTED = 3
    """A limit, a hook or a breaker stopped the run."""
    WAITING = 4
    """A run waits for an answer, and nobody can be asked here: it goes on waiting where it runs."""
    USAGE = 64
    """The command line itself is wrong."""
    LOST = 75
    """A server that was there is gone, and did not come back for long; what becomes of the run, nobody here knows."""
    CANCELLED = 130


class Refused(Exception):
    """The command line asks for what cannot be done; the message is one sentence that says what to do instead."""

    code = Exit.USAGE


class Broken(Refused):
    """Code that was named on the command line is there and fails when it is loaded."""

    code = Exit.FAILED


class Unwritten(Refused):
    """What was asked for is there, and cannot be written to where it should go."""

    code = Exit.FAILED


class Waiting(Refused):
    """A run asks something that nobody here can answer; the message says how to."""

    code = Exit.WAITING


class Failed(Refused):
    """A server or a database could not, or would not; the message says why."""

    code = Exit.FAILED


class Lost(Failed):
    """A server was waited for in vain; the message says how to take up what was followed there."""

    code = Exit.LOST
