"""Text that comes with Python: its library's sources as character codes."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Modules of every Python from 3.9 on: 2.7 MB. Other text differs between installations.
MODULES = (
    "_pydecimal", "_pyio", "argparse", "ast", "bdb", "codecs", "configparser", "contextlib", "dataclasses", "difflib",
    "doctest", "enum", "fractions", "ftplib", "functools", "gettext", "heapq", "imaplib", "inspect", "ipaddress",
    "mailbox", "optparse", "pdb", "pickle", "platform", "plistlib", "pydoc", "random", "shutil", "smtplib",
    "socket", "ssl", "statistics", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize",
    "traceback", "turtle", "typing", "uuid",
)  # fmt: skip
VALIDATION_SHARE = 0.1
CHARACTERS = 128  # ASCII; any other character counts as a question mark


class Text(NamedTuple):
    """Character codes, int64, in the order of the text."""

    training: np.ndarray
    validation: np.ndarray


def load_text() -> Text:
    """Load the text; the end of each module is for validation.

    Raises:
        FileNotFoundError: this Python has no sources of its library.
    """
    training, validation = [], []
    for module in MODULES:
        text = (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text(encoding="utf-8")
        numbers = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)
        end = round(len(numbers) * (1 - VALIDATION_SHARE))
        training.append(numbers[:end])
        validation.append(numbers[end:])
    return Text(np.concatenate(training), np.concatenate(validation))
