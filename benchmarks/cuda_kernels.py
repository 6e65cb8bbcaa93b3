"""Time the Triton kernels on a GPU.

`benchmarks/kernels.py` calls this for ``--device cuda``. With ``--device interpreter`` the same runs in Triton's
interpreter: a rehearsal, whose times mean nothing.

Each kernel is compared by the bytes that it must move: with a device-to-device copy of the same float32 gradient, with
the same quantizer in PyTorch's operations, and with ``x.half()``. A round times each once, between CUDA events; the
table shows medians over the rounds. A call's upload of its table of addresses counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from horovod_quant.kernels import triton as k
from horovod_quant.kernels.keys import RngKey
from horovod_quant.kernels.layout import ROW, buckets, code_words, sum_words, tiles

SIZES = {"1M": 10**6, "10M": 10**7, "25M": 25 * 10**6, "100M": 10**8, "1B": 10**9}
INTERPRETED_SIZES = {"4k": 4096}
ALL_SIZES = {**SIZES, **INTERPRETED_SIZES}
COPY = "copy, device to device"
CALLS = 10  # of one measurement
WORKERS = 4


class Case(NamedTuple):
    """A kernel call and its target.

    Attributes:
        bytes: that the call must move.
        target: share of the copy's bandwidth that it should reach.
    """

    name: str
    call: Callable[[], Any]
    bytes: int
    target: float | None = None


def cases(elements: int, bucket_size: int, device: torch.device) -> list[Case]:
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(elements, device=device, generator=generator) * 1e-3
    out = torch.zeros_like(x)
    half = torch.zeros_like(x, dtype=torch.float16)
    key = RngKey(0, "benchmark").key("worker", 0)
    norm_count = buckets(elements, bucket_size)
    norms = k.bucket_maxima(x, bucket_size)
    square_sums = torch.zeros(norm_count, dtype=torch.float64, device=device)
    found = [
        Case(COPY, lambda: out.copy_(x), 8 * elements),
        Case("x.half()", lambda: half.copy_(x), 6 * elements),
        Case("bucket_maxima", lambda: k.bucket_maxima(x, bucket_size, norms), 4 * (elements + norm_count), 0.85),
        Case(
            "bucket_square_sums", lambda: k.bucket_square_sums(x, bucket_size, square_sums),
            4 * elements + 8 * norm_count, 0.85,
        ),
    ]  # fmt: skip

    def add(name: str, gradient: torch.Tensor, packed: int, kernel: Callable, *arguments: Any) -> None:
        moved = gradient.element_size() * elements + 4 * (packed + norm_count)
        found.append(Case(name, lambda: kernel(*arguments), moved, 0.8))

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        gradient, decoded = x.to(dtype), out.to(dtype)
        kind = "" if dtype is torch.float32 else f", {dtype}".replace("torch.", "")
        for width in (4, 8):
            levels = ((1 << (width - 1)) - 1) // WORKERS or 1
            words = torch.zeros(sum_words(elements, width), dtype=torch.int32, device=device)
            add(f"encode_uniform_sum, {width} bits{kind}", gradient, len(words), k.encode_uniform_sum,
                gradient, norms, bucket_size, levels, width, key, 0, words)  # fmt: skip
            add(f"decode_uniform_sum, {width} bits{kind}", gradient, len(words), k.decode_uniform_sum,
                words, norms, bucket_size, levels, width, 0.25, decoded)  # fmt: skip
    levels = 1
    found += [
        Case(
            "quantize and pack, 4 bits, in PyTorch's operations",
            lambda: eager_encode(x, norms, bucket_size, levels), 4 * (elements + norm_count) + elements // 2,
        ),
        Case(
            "unpack and dequantize, 4 bits, in PyTorch's operations",
            lambda: eager_decode(words_of_4_bits, norms, bucket_size, levels, elements),
            4 * (elements + norm_count) + elements // 2,
        ),
    ]  # fmt: skip
    words_of_4_bits = eager_encode(x, norms, bucket_size, levels)

    for name, encode, decode in (
        ("uniform_codes", k.encode_uniform_codes, k.decode_uniform_codes),
        ("exponential", k.encode_exponential, k.decode_exponential),
    ):
        words = torch.zeros(code_words(elements, 4), dtype=torch.int32, device=device)
        add(f"encode_{name}, 4 bits", x, len(words), encode, x, norms, bucket_size, 4, key, 0, words)
        add(f"decode_{name}, 4 bits", x, len(words), decode, [words], [norms], bucket_size, 4, 0.25, out)
        messages = [words.clone() for _ in range(WORKERS)]
        found.append(
            Case(
                f"decode_{name}, 4 bits, n = {WORKERS}",
                lambda decode=decode, messages=messages: decode(
                    messages, [norms] * WORKERS, bucket_size, 4, 0.25, out
                ),
                4 * elements + 4 * WORKERS * (len(words) + norm_count),
            )
        )

    for bits in (2, 4):
        words, scales = k.encode_rotated(x, bits, key)
        moved = 4 * (elements + len(words) + len(scales))
        for name, call in (
            ("encode_rotated", partial(k.encode_rotated, x, bits, key, 0, words, scales)),
            ("decode_rotated", partial(k.decode_rotated, words, scales, bits, key, 0.25, out)),
        ):
            found.append(Case(f"{name}, {bits} bits", call, moved))

    momentum, scale = torch.zeros_like(x), torch.zeros_like(x)
    signs = torch.zeros(ROW * tiles(elements), dtype=torch.int32, device=device)
    votes = [signs.clone() for _ in range(WORKERS)]
    return found + [
        Case("binarize", lambda: k.binarize(x, momentum, scale, 0.9, key, 0, signs), 20 * elements + 4 * len(signs)),
        Case(f"vote, n = {WORKERS}", lambda: k.vote(votes, key, 0, signs), 4 * (WORKERS + 1) * len(signs)),
        Case("decode_signs", lambda: k.decode_signs(signs, 0.25, out), 4 * (elements + len(signs))),
    ]  # fmt: skip


def eager_encode(x: torch.Tensor, norms: torch.Tensor, bucket_size: int, levels: int) -> torch.Tensor:
    """Encode with PyTorch's operations, as a baseline.

    Stochastic rounding to digits of 4 bits, 8 digits a word.
    """
    padded = torch.nn.functional.pad(x, (0, -len(x) % bucket_size)).view(-1, bucket_size)
    y = padded * (levels / norms)[:, None]
    digits = torch.floor(y + torch.rand_like(y)).to(torch.int32).view(-1)
    grid = torch.nn.functional.pad(digits, (0, -len(digits) % (8 * ROW))).view(-1, 8, ROW)
    words = grid[:, 0].clone()
    for field in range(1, 8):
        words += grid[:, field] << (4 * field)
    return words.view(-1)


def eager_decode(
    words: torch.Tensor, norms: torch.Tensor, bucket_size: int, levels: int, elements: int
) -> torch.Tensor:
    """Decode what `eager_encode` returns."""
    rows = words.view(-1, ROW) + sum(1 << (4 * field + 3) for field in range(7)) - (1 << 31)
    digits = torch.stack([((rows >> (4 * field)) & 15) - 8 for field in range(8)], 1).view(-1)
    digits = digits[: len(norms) * bucket_size].to(torch.float32)
    digits = torch.nn.functional.pad(digits, (0, len(norms) * bucket_size - len(digits)))
    return (digits.view(-1, bucket_size) * (norms / levels)[:, None]).view(-1)[:elements]


def measure(size: str, selected: list[Case], rounds: int) -> list[dict[str, Any]]:
    for case in selected:
        case.call()  # compiles
    times: dict[str, list[float]] = {case.name: [] for case in selected}
    for _ in range(rounds):
        for case in selected:
            times[case.name].append(_seconds(case.call))
    copy = next(case for case in selected if case.name == COPY)
    copied = copy.bytes / median(times[COPY])
    return [
        {
            "kernel": case.name,
            "size": size,
            "elements": ALL_SIZES[size],
            "milliseconds": 1e3 * median(times[case.name]),
            "gigabytes_per_second": 1e-9 * case.bytes / median(times[case.name]),
            "share_of_copy": case.bytes / median(times[case.name]) / copied,
            "target": case.target if size == "100M" else None,
        }
        for case in selected
    ]


def _seconds(call: Callable[[], Any]) -> float:
    """Return the GPU time of one call.

    It includes launches where they take longer than the work.
    """
    if k.INTERPRETED:
        start = perf_counter()
        call()
        return perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / CALLS


def print_table(console: Console, size: str, results: list[dict[str, Any]]) -> None:
    table = Table(title=f"{size} elements, time per call")
    table.add_column("kernel")
    for column in ("ms", "GB/s moved", "share of copy bandwidth", "target"):
        table.add_column(column, justify="right")
    for result in results:
        target, share = result["target"], f"{result['share_of_copy']:.2f}"
        missed = target is not None and result["share_of_copy"] < target
        table.add_row(
            result["kernel"],
            f"{result['milliseconds']:.3f}",
            f"{result['gigabytes_per_second']:.0f}",
            f"[red]{share}[/red]" if missed else share,
            "" if target is None else f"{target:.2f}",
        )
    console.print(table)


def where() -> str:
    """Name the device that the kernels run on."""
    return "the CPU, interpreted" if k.INTERPRETED else torch.cuda.get_device_name()


def run(
    console: Console,
    sizes: Iterable[str],
    bucket_size: int,
    only: Collection[str],
    rounds: int,
    save: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Time every kernel at every size.

    Args:
        save: called with all results so far after each size.
    """
    device = torch.device("cpu") if k.INTERPRETED else torch.device("cuda", torch.cuda.current_device())
    console.print(f"Triton kernels on {where()}")
    results = []
    for size in sizes:
        selected = [
            case
            for case in cases(ALL_SIZES[size], bucket_size, device)
            if case.name == COPY or any(part in case.name for part in only)
        ]
        measured = measure(size, selected, rounds)
        print_table(console, size, measured)
        results += measured
        save(results)
        del selected  # and the memory that its calls hold
    return results
