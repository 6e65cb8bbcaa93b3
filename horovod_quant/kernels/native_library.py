"""Loader of the compiled library of native.cpp.

It is loaded at the first use.

Environment variables:
    HOROVOD_QUANT_ISA: ``baseline``, ``avx2`` or ``avx512`` instead of the best that the processor has.
    HOROVOD_QUANT_LIBRARY: path of a library to load instead of the installed one.
"""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

INSTRUCTION_SETS = ("baseline", "avx2", "avx512")

POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_GRADIENT = (POINTER, _INT, _INT)  # data, type, number of elements
_EACH = (POINTER, POINTER, POINTER)  # data, types, numbers of elements for each gradient
_NORMS = (POINTER, _INT)  # norms, bucket size
_RANDOM = (POINTER, _INT)  # key, start
_OUT = (POINTER, _INT)  # data, type
_WORKERS = (POINTER, POINTER, _INT)  # words, norms or scales, number of workers
_RANDOM_EACH = (POINTER, POINTER)  # keys, starts
_OUT_EACH = (POINTER, POINTER)  # data, types
_DECODE_CODES_EACH = (_INT, *_WORKERS, POINTER, _INT, _INT, _FLOAT, POINTER, *_OUT_EACH)

# Positions rather than a structure: filling one with ctypes took 8.6 us, a call with twelve arguments 4.7 us.
_SIGNATURES = {
    "bucket_maxima": (*_GRADIENT, _INT, POINTER),
    "bucket_maxima_each": (_INT, *_EACH, _INT, POINTER),
    "bucket_square_sums": (*_GRADIENT, _INT, POINTER),
    "bucket_sums": (*_GRADIENT, _INT, POINTER),
    "bucket_magnitude_sums": (*_GRADIENT, _INT, POINTER),
    "encode_uniform_sum": (*_GRADIENT, *_NORMS, _INT, *_RANDOM, _INT, POINTER),
    "encode_uniform_sum_each": (_INT, *_EACH, *_NORMS, _INT, *_RANDOM_EACH, _INT, POINTER),
    "bucket_square_sums_each": (_INT, *_EACH, _INT, POINTER),
    "encode_uniform_codes": (*_GRADIENT, *_NORMS, *_RANDOM, _INT, POINTER),
    "encode_norms_and_codes_each": (_INT, *_EACH, _INT, _INT, _INT, _INT, *_RANDOM_EACH, POINTER, POINTER),
    "round_exponential": (*_GRADIENT, *_NORMS, *_RANDOM, _INT, POINTER),
    "encode_exponential": (*_GRADIENT, *_NORMS, *_RANDOM, _INT, POINTER),
    "decode_uniform_sum": (POINTER, POINTER, _INT, _INT, _INT, _INT, _FLOAT, *_OUT),
    "decode_uniform_sum_each": (_INT, POINTER, POINTER, POINTER, _INT, _INT, _INT, _FLOAT, *_OUT_EACH),
    "decode_uniform_codes": (*_WORKERS, _INT, _INT, _INT, _FLOAT, POINTER, *_OUT),
    "decode_exponential": (*_WORKERS, _INT, _INT, _INT, _FLOAT, POINTER, *_OUT),
    "decode_uniform_codes_each": _DECODE_CODES_EACH,
    "decode_exponential_each": _DECODE_CODES_EACH,
    "binarize": (*_GRADIENT, POINTER, POINTER, _FLOAT, _FLOAT, *_RANDOM, POINTER, POINTER),
    "vote": (POINTER, _INT, _INT, *_RANDOM, POINTER),
    "decode_signs": (POINTER, _INT, _FLOAT, *_OUT),
    "binarize_each": (_INT, *_EACH, POINTER, POINTER, POINTER, POINTER, *_RANDOM_EACH, POINTER, POINTER),
    "vote_each": (_INT, POINTER, POINTER, _INT, *_RANDOM_EACH, POINTER),
    "decode_signs_each": (_INT, POINTER, POINTER, _FLOAT, *_OUT_EACH),
    "encode_rotated": (*_GRADIENT, _INT, _INT, *_RANDOM, POINTER, POINTER),
    "add_rotated": (*_WORKERS, _INT, _INT, _INT, _FLOAT, *_RANDOM, *_OUT),
    "encode_rotated_each": (_INT, *_EACH, _INT, _INT, *_RANDOM_EACH, POINTER, POINTER),
    "add_rotated_each": (_INT, *_WORKERS, POINTER, _INT, _INT, _FLOAT, *_RANDOM_EACH, *_OUT_EACH),
    "scale_each": (_INT, *_EACH, _FLOAT, *_OUT_EACH),
    "rotated_samples": (*_GRADIENT, _INT, *_RANDOM, POINTER),
    "encode_rotated_sum": (*_GRADIENT, POINTER, _INT, POINTER, *_RANDOM, POINTER, POINTER),
    "rotated_sum_checks": (POINTER, _INT, _INT, POINTER),
    "decode_rotated_sum": (POINTER, POINTER, _INT, _INT, _FLOAT, *_RANDOM, *_OUT),
    "elias_measure": (POINTER, _INT, _INT, _INT, POINTER),
    "elias_encode_codes": (POINTER, _INT, _INT, _INT, _INT, POINTER),
    "elias_decode_codes": (POINTER, _INT, _INT, _INT, _INT, POINTER),
}
_WITH_RESULT = ("elias_decode_codes",)
_LETTERS = {POINTER: "p", _INT: "i", _FLOAT: "f"}


def _interface_version() -> int:
    """Return the sum of the signatures' FNV-1a hashes.

    The compiled library has the same number.
    """
    total = 0
    for name, arguments in _SIGNATURES.items():
        digest = 0xCBF29CE484222325
        result = "i" if name in _WITH_RESULT else "v"
        for byte in f"{name} {result}{''.join(map(_LETTERS.__getitem__, arguments))}".encode():
            digest = (digest ^ byte) * 0x100000001B3 % 2**64
        total += digest
    return total % 2**64


class NativeKernelsUnavailable(ImportError):
    """Error for a library that cannot be loaded.

    The message has the reason.
    """


class _Library:
    """A loaded library and its functions for one instruction set.

    Attributes:
        available: the instruction sets of this processor, the best last.
        instruction_set: the one in use.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.handle = ctypes.CDLL(str(path))
            self.handle.interface_version.restype = ctypes.c_uint64
            version = self.handle.interface_version()
            best = int(self.handle.best_instruction_set())
        except (OSError, AttributeError) as error:
            raise NativeKernelsUnavailable(f"cannot load {path}: {error}") from error
        expected = _interface_version()
        if version != expected:
            raise NativeKernelsUnavailable(
                f"{path} was built from other sources (interface {version:x}, not {expected:x}): install again"
            )
        self.available = INSTRUCTION_SETS[: best + 1]

    def use(self, instruction_set: str) -> None:
        """Use an instruction set from now on.

        Raises:
            ValueError: the processor does not have it.
        """
        if instruction_set not in self.available:
            raise ValueError(
                f"instruction set {instruction_set!r}: this processor has {', '.join(self.available)}"
            )
        self.instruction_set = instruction_set
        self.functions = SimpleNamespace()
        for name, arguments in _SIGNATURES.items():
            function = self.handle[f"{name}_{instruction_set}"]
            function.argtypes = arguments
            function.restype = _INT if name in _WITH_RESULT else None
            setattr(self.functions, name, function)


_library: _Library | None = None


def load(path: os.PathLike | None = None) -> None:
    """Load the library, from ``path`` instead of the package's folder if given.

    No effect if already loaded.

    Raises:
        NativeKernelsUnavailable: there is no library, or its version does not match.
        ValueError: HOROVOD_QUANT_ISA names an instruction set that the processor does not have.
    """
    global _library
    if _library is not None and path is None:
        return
    library = _Library(Path(path) if path else _library_path())
    library.use(os.environ.get("HOROVOD_QUANT_ISA") or library.available[-1])
    _library = library


def _library_path() -> Path:
    if os.environ.get("HOROVOD_QUANT_LIBRARY"):
        return Path(os.environ["HOROVOD_QUANT_LIBRARY"])
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        if (folder / f"_native{suffix}").exists():
            return folder / f"_native{suffix}"
    raise NativeKernelsUnavailable(
        f"no compiled library in {folder}: it was installed without a C++ compiler"
    )


def loaded() -> _Library:
    """Return the library, which is loaded first where necessary."""
    load()
    assert _library is not None
    return _library


def call(name: str, *arguments) -> int | None:
    """Call a function for the instruction set in use.

    The arguments must fit `_SIGNATURES`.
    """
    library = loaded() if _library is None else _library
    return getattr(library.functions, name)(*arguments)
