"""Builds of native.cpp for the tests: other compilers, no optimization, sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from horovod_quant.kernels import native, native_library

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
#if defined(__aarch64__)
extern "C" unsigned get_settings() {
  unsigned long settings;
  asm volatile("mrs %0, fpcr" : "=r"(settings));
  return settings;
}
extern "C" void set_settings(unsigned settings) { asm volatile("msr fpcr, %0" ::"r"((unsigned long)settings)); }
#else
#include <xmmintrin.h>
extern "C" unsigned get_settings() { return _mm_getcsr(); }
extern "C" void set_settings(unsigned settings) { _mm_setcsr(settings); }
#endif
"""

# By processor: the settings that flush subnormals and round towards zero, and which bits of the register are settings.
FLUSH_AND_ROUND_TOWARDS_ZERO = {
    "x86_64": (0x8040 | 0x6000, 0xFFC0),
    "aarch64": (1 << 24 | 3 << 22, 0xFFFFFFFF),
}


def compile_library(target: Path, source: Path, compiler: str, *flags: str) -> Path:
    """Compiles a shared library; skips the test where there is no such compiler."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    command = [compiler, "-std=c++17", "-shared", "-fPIC", *EXACT, *flags, str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return target


def sanitized(folder: Path, source: Path = SOURCE, *flags: str) -> dict[str, str]:
    """The environment of a process whose library checks each access."""
    library = compile_library(folder / "sanitized.so", source, "g++", *flags, *SANITIZERS)
    runtime = subprocess.check_output(["g++", "-print-file-name=libasan.so"], text=True).strip()
    return {
        **os.environ,
        "HOROVOD_QUANT_LIBRARY": str(library),
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def load_installed() -> None:
    """Loads the library that `scripts/setup` has compiled; skips the test where there is no compiler."""
    try:
        native_library.load()
    except native_library.NativeKernelsUnavailable as error:
        if shutil.which("g++"):
            pytest.fail(f"{error}; there is a compiler: run scripts/setup")
        pytest.skip(str(error))
