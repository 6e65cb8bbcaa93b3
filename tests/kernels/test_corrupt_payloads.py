"""Truncated, lengthened and altered payloads: every decoder refuses them or decodes them to something, and reads and
writes nothing outside of its buffers. A million inputs with --all, under AddressSanitizer.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import part
from native_builds import SOURCE, sanitized

DRIVER = Path(__file__).with_name("corrupt_payloads_driver.py")
INPUTS = 10**6
PAIRED = 20_000

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the driver on native.cpp with sanitizers."""
    source = Path(__file__).with_name("corrupt_payloads.cpp")
    environment = sanitized(tmp_path_factory.mktemp("native"), source, f"-I{SOURCE.parent}")

    def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, DRIVER, *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)

    return run


@pytest.mark.extended
def test_every_decoder_refuses_damaged_payloads_or_decodes_them(run: Run) -> None:
    assert_refused_and_decoded(run(INPUTS // 2, PAIRED), INPUTS)


def test_both_backends_refuse_and_decode_the_same() -> None:
    """As the library is installed, without a sanitizer, which takes half a minute to compile."""
    paired = part(PAIRED)
    command = [sys.executable, DRIVER, "0", str(paired)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert_refused_and_decoded(done, paired)


def assert_refused_and_decoded(done: subprocess.CompletedProcess[str], inputs: int) -> None:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert all(min(one.values()) > 20 and len(one) == 2 for one in counts.values()), counts
    assert sum(sum(one.values()) for one in counts.values()) >= inputs


@pytest.mark.extended
def test_one_word_too_far_would_be_seen(run: Run) -> None:
    done = run("overrun")
    assert done.returncode != 0
    # A vector that begins within the array and ends behind it has no name of its own.
    assert re.search("ERROR: AddressSanitizer: (heap-buffer-overflow|unknown-crash)", done.stderr)
