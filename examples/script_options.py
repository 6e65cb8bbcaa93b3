"""Types for argparse that several example scripts share.

It is not an example itself, and imports no framework.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from horovod_quant.frontends.methods import families, parse

METHOD_HELP = ", ".join(families())


def method(text: str) -> str:
    """Parse the name of a method."""
    try:
        return parse(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """Parse a number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: use at least 1")
    return number


def new_file(text: str) -> Path:
    """Parse the path of a file in an existing folder."""
    file = Path(text)
    if not file.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder")
    return file


def check_workers(parser: argparse.ArgumentParser, methods: Iterable[str], hvd: Any) -> None:
    """End the script if a method does not support the worker count.

    All workers must call it together.
    """
    for name in methods:
        scheme = parse(name).scheme()
        try:
            if scheme is not None:
                scheme.check_workers(max(2, hvd.size()))  # as the compressor does
        except ValueError as error:
            parser.error(f"argument --method: {name}: {error}")
