"""Arguments that do not fit, and what the backends say: each kernel's call in the topics, damaged in many ways."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Callable, NamedTuple

import numpy as np
from conformance.suite import TOPICS, Backend, Out, cases, function_of, make_out

from horovod_quant.kernels import reference
from horovod_quant.kernels.formats import Sums
from horovod_quant.kernels.segments import Batch

NATIVE, TENSORFLOW, BOTH = ("native",), ("tensorflow",), ("native", "triton")
ALL = ("native", "triton", "tensorflow")


class Damage(NamedTuple):
    """What becomes of arguments.

    Attributes:
        kernels: a pattern of the beginnings of names; those of the kernels that have the argument are called.
        arguments: names of arguments, each of which is damaged alone.
        values: what an argument becomes, functions of its valid value, or the values of several arguments.
        message: a pattern in the error's message; ``{valid}`` is for dtype and length of the valid value.
        backends: those that refuse it.
    """

    kernels: str
    arguments: str
    values: Sequence[Any]
    message: str
    backends: tuple[str, ...] = BOTH


def change(of_array: Callable[[np.ndarray], Any], of_out: Callable[[Out], Any] = make_out) -> Callable:
    """Return a function that changes an array, or the last one of a list."""

    def changed(valid: Any) -> Any:
        if isinstance(valid, list):
            return [*valid[:-1], changed(valid[-1])]
        return of_out(valid) if isinstance(valid, Out) else of_array(valid)

    return changed


def typed(dtype: Any) -> Callable:
    return change(lambda array: array.astype(dtype), lambda out: out._replace(dtype=dtype))


shorter = change(lambda array: array[:-1], lambda out: out._replace(elements=out.elements - 1))
half = change(lambda array: array[: len(array) // 2])
twice = change(lambda array: np.concatenate([array, array]))
column = change(lambda array: array.reshape(-1, 1))
read_only = change(np.copy, lambda out: np.broadcast_to(np.zeros((), out.dtype), out.elements))
buffer = change(np.copy)


def nothing(valid: list) -> list:
    return []


def fewer(valid: list) -> list:
    return valid[:-1]


def batch(**changes: Callable[[Any], Any]) -> Callable[[Batch], Batch]:
    """Return a function that changes attributes of a batch."""

    def changed(valid: Batch) -> Batch:
        found = copy.copy(valid)
        for name, function in changes.items():
            setattr(found, name, function(list(getattr(valid, name))))
        return found

    return changed


def codec(**changes: Any) -> Callable[[Any], Any]:
    """Return a function that changes attributes of a format."""
    return lambda valid: dataclasses.replace(valid, **changes)


def sums(**changes: Callable[[Any], Any]) -> Callable[[Sums], Sums]:
    """Return a function that changes attributes of sums."""
    return lambda valid: valid._replace(
        **{name: function(getattr(valid, name)) for name, function in changes.items()}
    )


def momentum(of_array: Callable) -> Callable:
    return lambda states: [(of_array(states[0][0]), *states[0][1:]), *states[1:]]


def scale(of_array: Callable) -> Callable:
    return lambda states: [*states[:-1], (states[-1][0], of_array(states[-1][1]), states[-1][2])]


# What the native backend has from the reference takes any numbers.
READS = "(?!round_uniform|to_float)"
ENCODES = "bucket|encode|elias|vote|binarize"
FEWER_STARTS = batch(starts=fewer)

DAMAGES = [
    Damage(READS, "x gradient", [typed(np.int32)], "int32", ALL),
    Damage(READS, "x gradient", [typed(np.int32)], "float32, float16, float64, or bfloat16", NATIVE),
    Damage(READS, "x gradient", [typed(">f4")], "dtype >f4", NATIVE),
    Damage(READS, "x gradient", [column], "has shape .*flat"),
    Damage("(?!round_uniform)", "bucket_size", [33, 0, -32], "bucket_size=.*multiple of 32"),
    Damage(".*code_uniform_sum", "levels", [0, 2**15], "levels=(0|32768): use"),
    Damage("(?!.*pack)", "width", [0, 17], "width=(0|17): use"),
    Damage("(en|de)code_uniform_codes|elias", "bits", [1, 17], "bits=(1|17): use"),
    Damage("(round|encode|decode)_exponential", "bits", [1, 9], "bits=(1|9): use"),
    Damage("(encode|decode|add)_rotated$", "bits", [0, 5], "bits=(0|5): use 1 to 4", ALL),
    Damage("", "samples", [0, 1025], "samples=(0|1025): use", NATIVE),
    # Norms, scales and words of codes may be longer than needed.
    Damage("(encode|decode|round_exp)", "norms", [shorter], r"norms: \d+ norms for \d+ elements"),
    Damage("(encode|decode|round_exp)", "norms", [column], "norms has shape .*flat"),
    Damage("encode|decode|round_exp|segments", "norms", [typed(np.float64)], "norms has dtype"),
    Damage("(decode|add)_rotated$", "scales", [shorter], r"scales: \d+ scales for \d+ elements; \d", ALL),
    Damage("(decode|add)_rotated$", "scales", [typed(np.float64), column], "scales has (dtype|shape)"),
    Damage("", "steps", [shorter, typed(np.float64), column], "steps(: . step sizes for| has)", NATIVE),
    Damage("decode|add|elias|rotated|unpack_[sc]", "words", [shorter], r"words: \d+ words cannot hold", ALL),
    Damage("unpack_flags", "words", [shorter, twice], "words cannot hold"),
    Damage("(?!segments).*_sum", "words", [twice], "words cannot hold", ALL),
    Damage("(?!unpack)", "words", [typed(np.float32), column], "words has (dtype|shape)"),
    Damage("elias|decode_uniform", "words", [typed(np.uint32)], "words has dtype uint32", NATIVE),
    Damage("vote", "words", [[], shorter, twice], "multiple of 32"),
    Damage("decode_(uniform_codes|exponential)", "words norms", [[], fewer], "workers' words and"),
    Damage("decode_(uniform_codes|exponential)", "words", [{"words": [], "norms": []}], "0 workers' words and"),
    Damage("add_rotated", "words scales keys", [[], fewer], "workers' words, .* workers' scales, .* keys", ALL),
    Damage("add_rotated", "words", [{"words": [], "scales": [], "keys": []}], "0 workers' words", ALL),
    # Results.
    Damage(ENCODES, "out scales checks", [shorter, typed(np.int64)], "must be .*{valid}"),
    Damage("binarize", "momentum scale", [shorter, typed(np.float64)], "must be .*{valid}"),
    Damage("", "out", [read_only], "read-only", NATIVE),
    Damage("encode_rotated", "scales checks", [read_only], "read-only", NATIVE),
    Damage("bucket|encode|vote|binarize", "out scales", [buffer], "no buffer", TENSORFLOW),
    Damage("decode|add_rotated", "out", [typed(np.int16)], "int16", ALL),
    Damage("scale", "out", [shorter], r"for \d+ elements"),
    # Arithmetic, Elias codes.
    Damage("mean", "arrays", [shorter], "must be the same"),
    Damage("less|minimum|where", "b", [np.ones(2, np.float32)], "an array of 2 elements beside one of", ALL),
    Damage("elias_decode", "elements", [-1, 2**29], "elements=(-1|536870912): use", NATIVE),
    Damage("elias", "code", ["delta", None], "delta|None", NATIVE),
    Damage("elias", "payload", [typed(np.float64), column], "payload has (dtype float64|shape)", NATIVE),
    Damage("elias", "payload", [np.zeros(0, np.uint8)], "payload is empty", NATIVE),
    # Many segments.
    Damage("segments.*_(codes|sums)", "codec", [codec(bucket_size=size) for size in (33, 0, -32)],
           "bucket_size=.*multiple of 32"),
    Damage("segments.*_codes", "codec", [codec(bits=1), codec(bits=17)], "bits=(1|17): use"),
    Damage("segments.*_codes", "codec", [codec(levels="exponential", bits=bits) for bits in (1, 9)],
           "bits=(1|9): use"),
    Damage("segments.*_rotated", "codec", [codec(bits=0), codec(bits=5)], "bits=(0|5): use 1 to 4"),
    Damage("segments.*_sums", "codec", [codec(levels=0), codec(levels=2**15)], "levels=(0|32768): use"),
    Damage("segments.*_sums", "codec", [codec(width=0), codec(width=17)], "width=(0|17): use"),
    Damage("segments", "sums", [sums(words=half)], "words: not all within|words cannot hold"),
    Damage("segments", "sums", [sums(words=typed(np.float32)), sums(words=column)], "words has (dtype|shape)"),
    Damage("segments", "sums", [sums(norms=shorter), sums(norms=column)],
           r"norms: \d+ norms for|not all within|norms has shape"),
    Damage("segments", "sums", [sums(norms=typed(np.float64))], "norms has dtype"),
    Damage("segments.(convert|norms|encode|binarize)", "batch", [batch(values=typed(np.int32))], "x has dtype"),
    Damage("segments.convert", "batch", [batch(values=column)], "x has shape"),
    Damage("segments.(norms|encode|binarize)", "batch", [batch(values=column)], "x has shape", NATIVE),
    Damage("segments.(binarize|vote|encode_[cs])", "batch", [FEWER_STARTS], r"\d starts, |starts \[\d\]"),
    Damage("segments.*rotated", "batch", [FEWER_STARTS], r"\d starts, ", NATIVE),
    Damage("segments.encode_[cs]", "batch", [batch(chains=nothing, steps=nothing)], r"0 chains|keys are \[0"),
    Damage("segments.encode_c", "batch", [batch(values=lambda values: [*values, values[0]])], "of 6 gradients"),
    Damage("segments.binarize", "batch", [batch(states=nothing)], "0 states of|momenta"),
    Damage("segments.binarize", "batch", [batch(states=momentum(shorter))],
           r"momenta(\[0\] is float32\[\d+\]; it must be float32\[\d+\]|: they must be float32)"),
    Damage("segments.binarize", "batch", [batch(states=scale(typed(np.float64)))],
           r"scales(\[\d\] is float64\[\d+\]; it must be float32\[\d+\]|: they must be float32)"),
    Damage("segments", "norms", [shorter, column], r"norms: \d+ norms for|not all within|norms has shape"),
    Damage("segments.encode_sums", "norms", [twice], r"norms: \d+ norms for"),
    Damage("segments", "payload payloads", [half], "not all within|words cannot hold"),
    Damage("segments", "payloads", [[], typed(np.float64)], "no payloads|payloads has dtype"),
    Damage("segments.(encode_[cr]|binarize|vote)", "at", [lambda at: [*at[:-1], at[-1] - 2]], "not all within"),
    Damage("segments.(encode_[cr]|binarize|vote)", "at", [lambda at: [-2, *at[1:]]], "not all within"),
    Damage("segments.encode_r", "at", [lambda at: [*at[:-1], at[-1] - 1]], "gradients' scales.*not all within"),
    Damage("segments.scale", "outs", [shorter], r"arrays of|for \d+ elements"),
    Damage("segments.scale", "outs", [fewer], "arrays of", NATIVE),
]  # fmt: skip


@cache
def valid_calls() -> dict[str, dict[str, Any]]:
    """Return the arguments of a call of each kernel, by name.

    Of the calls in the topics it is one with most results to write to.
    """
    found: dict[str, dict[str, Any]] = {}
    most: dict[str, int] = {}
    scripts = [(name, number) for name, topic in TOPICS.items() if topic.quick for number in (0, 1)]
    for kernel, arguments, *_ in (case for script in scripts for case in cases(*script)):
        names = inspect.signature(function_of(reference, kernel)).parameters
        outs = sum(isinstance(value, Out) for value in arguments)
        if outs > most.get(kernel, -1) and all(map(can_be_damaged, arguments)) and "composed" not in kernel:
            found[kernel], most[kernel] = dict(zip(names, arguments)), outs
    return found


def can_be_damaged(value: Any) -> bool:
    """True if something is missing when a part is missing."""
    if isinstance(value, list):
        return len(value) > 1
    if isinstance(value, np.ndarray):
        return value.size > 0
    return not isinstance(value, Out) or value.elements > 0


def assert_refused(backend: Backend) -> None:
    """Each damaged call raises TypeError or ValueError with its message."""
    wrong = []
    for damage in (damage for damage in DAMAGES if backend.name in damage.backends):
        with np.errstate(invalid="ignore"):
            damaged = list(damaged_calls(backend, damage))
        assert damaged, f"{damage} is of no call"
        for kernel, message, arguments in damaged:
            try:
                backend.called(kernel, arguments)
            except (TypeError, ValueError) as error:
                if not re.search(message, str(error)):
                    wrong.append(f"{kernel}: {error}, not {message}")
            else:
                wrong.append(f"{kernel} accepts what {message} is about: {damage}")
    assert not wrong, "\n".join(wrong)


def damaged_calls(backend: Backend, damage: Damage) -> Iterator[tuple[str, str, tuple]]:
    """Generate the kernel, the pattern of its message, and the arguments of each call."""
    for kernel, valid in valid_calls().items():
        if not re.match(damage.kernels, kernel) or not backend.has(kernel):
            continue
        for name in (each for each in damage.arguments.split() if valid.get(each) is not None):
            for value in damage.values:
                given = (
                    value
                    if isinstance(value, dict)
                    else {name: value(valid[name]) if callable(value) else value}
                )
                message = damage.message.replace("{valid}", re.escape(described(valid[name])))
                yield kernel, message, tuple({**valid, **given}.values())


def described(value: Any) -> str:
    """Return dtype and length of an array, as in messages."""
    if isinstance(value, (np.ndarray, Out)):
        return f"{np.dtype(value.dtype)}[{value.elements if isinstance(value, Out) else len(value)}]"
    return ""
