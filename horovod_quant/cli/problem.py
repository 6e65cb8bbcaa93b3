"""Wrong arguments, files to write, and a failing output, in all commands."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

LOST = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors after which an output accepts nothing more."""


class Problem(Exception):
    """An argument that cannot be used; the message names it."""

    @staticmethod
    @contextmanager
    def of(argument: str) -> Iterator[None]:
        """Raise errors of the block as problems of an argument."""
        try:
            yield
        except (ImportError, OSError, ValueError) as error:
            raise Problem(f"{argument}: {error}" if argument else str(error)) from None


def with_output(program: str, command: Callable[[], int]) -> int:
    """Run a command; return its exit status, or 1 if standard output did not take all that it had to say.

    Ctrl-C ends it at once, also where it waits in Horovod.
    """
    open_closed_streams()
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # what is left for the interpreter's end fails without a word of ours
    except OSError as error:
        if error.filename is not None or error.errno not in LOST:
            raise
        give_up_output(program, error)
        return 1
    finally:
        signal.signal(signal.SIGINT, interrupt)


def write_line(line: str, stream: TextIO) -> None:
    """Write it at once: mpirun puts a prefix before whatever comes, also before a newline that `print` sends alone.

    A stream that takes no more ends no measurement: the report fails on it again.
    """
    with suppress(OSError):
        stream.write(f"{line}\n")
        stream.flush()


def give_up_output(program: str, error: OSError) -> None:
    """Drop what standard output does not take; say why, unless a reader such as ``head`` has had enough."""
    if not isinstance(error, BrokenPipeError):
        write_line(f"{program}: standard output: {error.strerror}", sys.stderr)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    os.close(sink)


def open_closed_streams() -> None:
    """Give descriptors to the standard streams that are closed: the next file or pipe would take theirs.

    Writing to standard output fails then, as it should.
    """
    for name, mode, flags in (
        ("stdin", "r", os.O_RDONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, flags), mode))


def check_file(argument: str, path: str) -> None:
    """Raise `Problem` unless `write_file` can write there, before anything is computed."""
    with Problem.of(argument):
        if not path:
            raise ValueError("'' is no name of a file")
        if os.path.isdir(path) or path.endswith(os.sep):
            raise ValueError(f"{path} is not a file")
        if os.path.exists(path) and not os.path.isfile(path):
            return  # a reader of a pipe would take a trial for all that comes
        for each in (path, _beside(path)):
            is_new = not os.path.exists(each)
            with open(each, "a"):
                pass
            if is_new:
                with suppress(FileNotFoundError):  # another worker, started by a launcher that tells no rank
                    os.unlink(os.path.realpath(each))


def write_file(path: str, text: str) -> None:
    """Write a file whole or not at all, for the process may be killed; what is no file takes it as it comes."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w") as file:
            file.write(text)
        return
    part = _beside(path)
    try:
        with open(part, "w") as file:
            file.write(text)
        os.replace(part, os.path.realpath(path))
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)


def _beside(path: str) -> str:
    return f"{os.path.realpath(path)}.part"
