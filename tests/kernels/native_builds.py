"""Builds of native.cpp for the tests: other compilers, no optimization, sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from horovod_quant.kernels import native

SOURCE = Path(native.__file__).with_name("native.cpp")

# What setup.py passes, less -O3.
EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")

BUILDS = {
    "gcc-O0": ("g++", "-O0"),
    "gcc-O3": ("g++", "-O3"),
    "clang-O3": ("clang++", "-O3"),
}

# Without optimization, with which compiling takes three times as long.
SANITIZERS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

# Reads and writes the processor's floating-point settings, as PyTorch's set_flush_denormal does.
CONTROL_REGISTER = """
#include <xmmintrin.h>
extern "C" unsigned get_settings() { return _mm_getcsr(); }
extern "C" void set_settings(unsigned settings) { _mm_setcsr(settings); }
"""


def compile_library(target: Path, source: Path, compiler: str, *flags: str) -> Path:
    """Compiles a shared library; skips the test where there is no such compiler."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    command = [compiler, "-std=c++17", "-shared", "-fPIC", *EXACT, *flags, str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return target
