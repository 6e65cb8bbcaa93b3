"""Arguments that do not fit, and what the backends say."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from conformance.cases import KEY, Out
from conformance.suite import mapped

X, NORMS = np.ones(100, np.float32), np.ones(4, np.float32)
WORDS = np.zeros(512, np.int32)
CODES = WORDS.view(np.uint32)
OUT = Out(100, np.float32)
UNALIKE = [WORDS, WORDS[:31]]

NATIVE, TRITON, BOTH = ("native",), ("triton",), ("native", "triton")
ALL = ("native", "triton", "tensorflow")


class Refused(NamedTuple):
    """A call, a pattern in the error's message, and the backends that refuse it."""

    kernel: str
    arguments: tuple
    message: str
    backends: tuple[str, ...] = BOTH


REFUSED = [
    Refused("bucket_maxima", (X.astype(np.int32), 32), "int32", ALL),
    Refused("bucket_maxima", (X.astype(np.int32), 32), "float32, float16, float64, or bfloat16", NATIVE),
    Refused("bucket_maxima", (X.astype(">f4"), 32), "dtype >f4", NATIVE),
    Refused("bucket_maxima", (X.reshape(10, 10), 32), "flat"),
    Refused("bucket_maxima", (X, 33), "multiple of 32"),
    Refused("bucket_maxima", (X, 0), "multiple of 32"),
    Refused("bucket_maxima", (X, -32), "multiple of 32"),
    Refused("bucket_maxima", (X, 32, np.empty(3, np.float32)), r"float32\[4\]"),
    Refused("bucket_maxima", (X, 32, np.empty(4, np.float64)), r"float32\[4\]"),
    Refused("bucket_maxima", (X, 32, np.broadcast_to(np.float32(0), 4)), "read-only", NATIVE),
    Refused("bucket_maxima", (X, 32, NORMS), "no buffer", ("tensorflow",)),
    Refused("bucket_square_sums", (X, 32, np.empty(4, np.float32)), r"float64\[4\]"),
    Refused("round_exponential", (X, NORMS, 32, 9, KEY), "bits=9", NATIVE),
    Refused("encode_uniform_sum", (X, NORMS[:3], 32, 7, 4, KEY), "3 norms for 100 elements"),
    Refused("encode_uniform_sum", (X, NORMS.astype(np.float64), 32, 7, 4, KEY), "norms has dtype"),
    Refused("encode_uniform_sum", (X, NORMS, 32, 0, 4, KEY), "levels=0"),
    Refused("encode_uniform_sum", (X, NORMS, 32, 2**15, 4, KEY), "levels=32768"),
    Refused("encode_uniform_sum", (X, NORMS, 32, 7, 17, KEY), "width=17"),
    Refused("encode_uniform_sum", (X, NORMS, 32, 7, 4, KEY, 0, WORDS[:31]), r"int32\[32\]"),
    Refused("encode_uniform_codes", (X, NORMS, 32, 1, KEY), "bits=1"),
    Refused("encode_exponential", (X, NORMS, 32, 1, KEY), "bits=1"),
    Refused("encode_exponential", (X, NORMS, 32, 9, KEY), "bits=9"),
    Refused("decode_uniform_sum", (WORDS[:31], NORMS, 32, 7, 4, 1.0, OUT), "31 words cannot hold"),
    Refused("decode_uniform_sum", (WORDS[:64], NORMS, 32, 7, 4, 1.0, OUT), "64 words cannot hold"),
    Refused("decode_uniform_sum", (WORDS[:32], NORMS, 32, 7, 0, 1.0, OUT), "width=0"),
    Refused("decode_uniform_sum", (WORDS[:32], NORMS, 32, 7, 4, 1.0, Out(100, np.int16)), "out has dtype"),
    Refused("decode_uniform_sum", (CODES[:32], NORMS, 32, 7, 4, 1.0, OUT), "words has dtype", NATIVE),
    Refused("decode_uniform_codes", ([], [], 32, 4, 1.0, OUT), "0 workers"),
    Refused("decode_uniform_codes", ([WORDS], [NORMS, NORMS], 32, 4, 1.0, OUT), "2 workers' norms"),
    Refused("decode_uniform_codes", (UNALIKE, [NORMS, NORMS], 32, 4, 1.0, OUT), "31 words"),
    Refused("decode_exponential", ([WORDS], [NORMS[:3]], 32, 4, 1.0, OUT), "3 norms"),
    Refused("decode_exponential", ([WORDS], [NORMS], 32, 9, 1.0, OUT), "bits=9"),
    Refused("encode_rotated", (X, 5, KEY), "bits=5: use 1 to 4", ALL),
    Refused("encode_rotated", (X, 2, KEY, 0, WORDS[:31]), r"int32\[32\]"),
    Refused("encode_rotated", (X, 2, KEY, 0, None, NORMS), r"float32\[1\]"),
    Refused("decode_rotated", (WORDS[:31], NORMS, 2, KEY, 1.0, OUT), "31 words cannot hold 128 codes", ALL),
    Refused("decode_rotated", (WORDS, NORMS[:0], 2, KEY, 1.0, OUT), "0 scales for 100 elements; 1", ALL),
    Refused("decode_rotated", (WORDS, WORDS, 2, KEY, 1.0, OUT), "scales has dtype"),
    Refused("add_rotated", ([], [], 4, [], 1.0, OUT), "0 workers"),
    Refused("add_rotated", ([WORDS], [NORMS], 4, [KEY, KEY], 1.0, OUT), "2 keys", ALL),
    Refused("add_rotated", ([WORDS], [NORMS], 5, [KEY], 1.0, OUT), "bits=5"),
    Refused("add_rotated", (UNALIKE, [NORMS] * 2, 4, [KEY] * 2, 1.0, OUT), "31 words"),
    Refused("binarize", (X, X[:99], X, 0.9, KEY), r"float32\[100\]"),
    Refused("binarize", (X, X, X.astype(np.float64), 0.9, KEY), r"float32\[100\]"),
    Refused("binarize", (X, X, X, 0.9, KEY, 0, WORDS[:31]), r"int32\[32\]"),
    Refused("vote", ([], KEY), "multiple of 32"),
    Refused("vote", ([WORDS, WORDS[:32]], KEY), "multiple of 32"),
    Refused("vote", ([WORDS[:31]], KEY), "multiple of 32"),
    Refused("decode_signs", (WORDS[:31], 1.0, OUT), "31 words"),
    Refused("decode_signs", (WORDS, 1.0, Out(5, np.int64)), "int64"),
    Refused("decode_signs", (WORDS[:32], 1.0, Out(5, np.int64)), "int64", ("tensorflow",)),
    Refused("unpack_sum", (WORDS[:32], 8, 2000), "32 words cannot hold 2000 digits of 8 bits", ("tensorflow",)),
    Refused("unpack_codes", (WORDS[:31], 4, 100), "31 words cannot hold 100 codes of 4 bits", ("tensorflow",)),
    Refused("unpack_flags", (WORDS[:3], 100), "3 words cannot hold"),
    Refused("scale", ([X], 1.0, Out(50, np.float32)), "for 50 elements"),
    Refused("mean", ([X, X[:50]],), "must be the same"),
    Refused("less", (X, X[:2]), "an array of 2 elements beside one of 100", ALL),
    Refused("minimum", (X, X[:2]), "an array of 2 elements beside one of 100", ALL),
    Refused("where", (X > 0, X[:2], 0.0), "an array of 2 elements beside one of 100", ALL),
    Refused("elias_encode_codes", (CODES[:32], 2, 3), "words has dtype uint32", NATIVE),
    Refused("elias_encode_codes", (WORDS[:32].reshape(-1, 1), 2, 3), "flat", NATIVE),
    Refused("elias_encode_codes", (WORDS[:31], 2, 3), "31 words cannot hold", NATIVE),
    Refused("elias_encode_codes", (WORDS[:32], 1, 3), "bits=1", NATIVE),
    Refused("elias_encode_codes", (WORDS[:32], 17, 3), "bits=17", NATIVE),
    Refused("elias_encode_codes", (WORDS[:32], 2, 3, "delta"), "delta", NATIVE),
    Refused("elias_decode_codes", (np.zeros(3, np.uint8), -1, 2), "elements=-1", NATIVE),
    Refused("elias_decode_codes", (np.zeros(3, np.uint8), 2**29, 2), "elements=536870912", NATIVE),
    Refused("elias_decode_codes", (np.zeros(3, np.uint8), 1, 1), "bits=1", NATIVE),
    Refused("elias_decode_codes", (np.zeros(3, np.uint8), 1, 17), "bits=17", NATIVE),
    Refused("elias_decode_codes", (np.zeros(3, np.uint8), 1, 2, None), "None", NATIVE),
    Refused("elias_decode_codes", (np.zeros(1), 3, 2), "payload has dtype float64", NATIVE),
    Refused("elias_decode_codes", (np.zeros((1, 1), np.uint8), 3, 2), "payload has shape", NATIVE),
    Refused("elias_decode_codes", (np.zeros(0, np.uint8), 3, 2), "payload is empty", NATIVE),
    Refused("elias_decode_codes", (np.zeros(3, np.uint8), 1, 2, "gamma", WORDS[:31]), r"int32\[32\]", NATIVE),
]  # fmt: skip
"""None of the arrays is written to, because each call is refused."""


def assert_refused(
    backend: Any,
    cases: Sequence[Refused],
    name: str,
    of_array: Callable[[np.ndarray], Any],
    of_out: Callable[[Out], Any],
) -> None:
    """Each call for the backend raises TypeError or ValueError with its message."""
    found = []
    for case in cases:
        if name not in case.backends:
            continue
        arguments = mapped(case.arguments, of_array, of_out)
        try:
            getattr(backend, case.kernel)(*arguments)
        except (TypeError, ValueError) as error:
            if not re.search(case.message, str(error)):
                found.append(f"{case.kernel}: {error}, not {case.message}")
        else:
            found.append(f"{case.kernel} takes what {case.message} is about")
    if found:
        pytest.fail("\n".join(found))
