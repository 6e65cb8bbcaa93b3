"""Wrong arguments, output files and failing output of all commands."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

LOST = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors after which an output accepts no more data."""


class Problem(Exception):
    """Invalid argument, named in the message."""

    @staticmethod
    @contextmanager
    def of(argument: str) -> Iterator[None]:
        """Convert errors of the block to `Problem`, with the argument's name."""
        try:
            yield
        except (ImportError, OSError, ValueError) as error:
            raise Problem(f"{argument}: {error}" if argument else str(error)) from None


def with_output(program: str, command: Callable[[], int]) -> int:
    """Run a command.

    Return its exit status, or 1 if standard output failed.

    Ctrl-C ends it at once, also where it waits in Horovod.
    """
    open_closed_streams()
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # an error at the interpreter's exit would not have our message
    except OSError as error:
        if error.filename is not None or error.errno not in LOST:
            raise
        give_up_output(program, error)
        return 1
    finally:
        signal.signal(signal.SIGINT, interrupt)


def write_line(line: str, stream: TextIO) -> None:
    """Write a line in one call.

    mpirun prefixes each write, and `print` sends the newline separately.

    Errors are ignored, so that a measurement continues: the report meets them again.
    """
    with suppress(OSError):
        stream.write(f"{line}\n")
        stream.flush()


def give_up_output(program: str, error: OSError) -> None:
    """Discard the rest of standard output.

    Report why, unless its reader has closed it.
    """
    if not isinstance(error, BrokenPipeError):
        write_line(f"{program}: standard output: {error.strerror}", sys.stderr)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    os.close(sink)


def open_closed_streams() -> None:
    """Open the closed standard streams, whose descriptors the next file would take.

    Writing to standard output still fails then, as it should.
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
            return  # the reader of a pipe would take a test for the whole output
        for each in (path, _beside(path)):
            is_new = not os.path.exists(each)
            with open(each, "a"):
                pass
            if is_new:
                with suppress(FileNotFoundError):  # another worker removed it, under a launcher without ranks
                    os.unlink(os.path.realpath(each))


def check_plot(argument: str, path: str) -> None:
    """Raise `Problem` unless matplotlib can write a plot there."""
    check_file(argument, path)
    with Problem.of(argument):
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
        except ImportError:
            raise ValueError("matplotlib is missing: pip install matplotlib") from None
        endings = [f".{name}" for name in sorted(FigureCanvasAgg.get_supported_filetypes())]
        if os.path.splitext(path)[1].lower() not in endings:
            raise ValueError(f"{path!r}: its name must end in one of {', '.join(endings)}")


def write_file(path: str, text: str) -> None:
    """Write a file atomically, or to a pipe or device directly.

    The process may be killed.
    """
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
