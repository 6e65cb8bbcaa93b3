"""Harness, not an example itself: types for argparse that several scripts share. It imports no framework."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from horovod_quant.frontends.methods import families, parse

METHOD_HELP = ", ".join(families())


def method(text: str) -> str:
    """The name of a method."""
    try:
        return parse(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """How many, at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: use at least 1")
    return number


def new_file(text: str) -> Path:
    """A file in a folder that is there."""
    file = Path(text)
    if not file.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder")
    return file


def check_workers(parser: argparse.ArgumentParser, methods: Iterable[str], hvd: Any) -> None:
    """Ends the script where a method cannot serve as many workers as there are. For all workers together."""
    for name in methods:
        scheme = parse(name).scheme()
        try:
            if scheme is not None:
                scheme.check_workers(hvd.size())
        except ValueError as error:
            parser.error(f"argument --method: {name}: {error}")
