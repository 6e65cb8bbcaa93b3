"""Time every kernel against a plain copy of the same float32 bytes.

A round times each kernel once, next to memcpy and to the cast to float16, so that all see the same state of the
machine; the table shows medians over the rounds, and the time as a multiple of memcpy beside its target. One thread,
whose CPU time is measured; buffers are kept between calls.

    python benchmarks/kernels.py                         # the native kernels, three sizes, AVX2 and better
    python benchmarks/kernels.py --only uniform vote --isa avx2 --json kernels.json
    python benchmarks/kernels.py --device cuda           # the Triton kernels on a GPU, see cuda_kernels.py
    python benchmarks/kernels.py --device interpreter    # the same calls in Triton's interpreter, to rehearse them
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import time
from collections.abc import Collection
from statistics import median
from typing import Any, Callable, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from horovod_quant import kernels
from horovod_quant.kernels import native, native_library, reference
from horovod_quant.kernels.formats import CodeFormat
from horovod_quant.kernels.keys import RngKey
from horovod_quant.kernels.layout import ROW, buckets, code_words, sum_words, tiles
from horovod_quant.kernels.segments import Batch, Rounder, segment_kernels

SIZES = {"64k": 64_000, "1M": 1_000_000, "25.6M": 25_600_000}
MIN_SECONDS = 0.001  # of one measurement: shorter kernels are called several times
WORKERS = 4
MEMCPY, FP16_CAST = "memcpy", "fp16 cast"


class Case(NamedTuple):
    """A kernel call with its arguments, and its targets.

    Targets are multiples of memcpy at 1M and 25.6M elements. With AVX2 the target at 1M is twice that, and the one at
    25.6M is ``target_avx2`` where that differs.
    """

    name: str
    call: Callable[[], Any]
    target_1m: float | None = None
    target_25m: float | None = None
    target_avx2: float | None = None

    def target(self, size: str, isa: str) -> float | None:
        if isa != "avx2":
            return {"1M": self.target_1m, "25.6M": self.target_25m}.get(size)
        large = self.target_avx2 or self.target_25m
        small = self.target_avx2 or self.target_1m
        return {"1M": small and 2 * small, "25.6M": large}.get(size)


def baselines(elements: int) -> list[Case]:
    """Return memcpy and the cast of Horovod's fp16 compression, into existing memory."""
    source = np.random.default_rng(0).standard_normal(elements, np.float32)
    target = np.zeros_like(source)
    copy = ctypes.memmove
    return [
        Case(MEMCPY, lambda: copy(target.ctypes.data, source.ctypes.data, source.nbytes)),
        Case(FP16_CAST, fp16_cast(source)),
    ]


def fp16_cast(source: np.ndarray) -> Callable[[], Any]:
    half = np.zeros(len(source), np.float16)
    try:
        import torch
    except ImportError:
        return lambda: np.copyto(half, source, casting="same_kind")
    torch.set_num_threads(1)
    from_torch, to_torch = torch.from_numpy(source), torch.from_numpy(half)
    return lambda: to_torch.copy_(from_torch)


def cases(k: Any, elements: int, bucket_size: int) -> list[Case]:
    rng = np.random.default_rng(1)
    chain = RngKey(0, "benchmark")
    key, own_key = chain.correlated("worker", 0, 1, WORKERS), chain.key("worker", 0)
    x = rng.standard_normal(elements, np.float32) * np.float32(1e-3)
    out = np.zeros(elements, np.float32)
    norms = k.bucket_maxima(x, bucket_size)
    square_sums = np.zeros(buckets(elements, bucket_size), np.float64)
    found = [
        Case("bucket_maxima", lambda: k.bucket_maxima(x, bucket_size, norms), 0.8, 0.7),
        Case("bucket_square_sums", lambda: k.bucket_square_sums(x, bucket_size, square_sums), 0.8, 0.7),
    ]

    def add(name: str, kernel: Callable, *arguments: Any, targets=(None, None), **more: Any) -> None:
        found.append(Case(name, lambda: kernel(*arguments, **more), *targets))

    for width in (2, 3, 4, 5, 8, 16):
        levels = ((1 << (width - 1)) - 1) // WORKERS or 1
        words = np.zeros(sum_words(elements, width), np.int32)
        add(f"encode_uniform_sum, {width} bits", k.encode_uniform_sum,
            x, norms, bucket_size, levels, width, key, 0, words, targets=(1.7, 0.9))  # fmt: skip
        add(f"decode_uniform_sum, {width} bits", k.decode_uniform_sum,
            words, norms, bucket_size, levels, width, 0.25, out, targets=(0.8, 0.8))  # fmt: skip
    for name, dtype in {"float16": np.float16, "bfloat16": np.uint16, "float64": np.float64}.items():
        typed = reference.store_float32(x, np.zeros(elements, dtype))
        words = np.zeros(sum_words(elements, 4), np.int32)
        add(f"encode_uniform_sum, 4 bits, {name}", k.encode_uniform_sum,
            typed, norms, bucket_size, 1, 4, key, 0, words)  # fmt: skip
        add(f"decode_uniform_sum, 4 bits, {name}", k.decode_uniform_sum,
            words, norms, bucket_size, 1, 4, 0.25, np.zeros_like(typed))  # fmt: skip
    for bits in (2, 4, 5, 8):
        words = np.zeros(code_words(elements, bits), np.int32)
        k.encode_uniform_codes(x, norms, bucket_size, bits, key, 0, words)
        messages = [words.copy() for _ in range(WORKERS)]
        add(f"encode_uniform_codes, {bits} bits", k.encode_uniform_codes,
            x, norms, bucket_size, bits, key, 0, words, targets=(1.7, 0.9))  # fmt: skip
        add(f"decode_uniform_codes, {bits} bits, n = {WORKERS}", k.decode_uniform_codes,
            messages, [norms] * WORKERS, bucket_size, bits, 0.25, out, targets=(2.2, 1.1))  # fmt: skip
    for bits, target in ((4, 2.5), (8, 1.7)):
        words = np.zeros(code_words(elements, bits), np.int32)
        k.encode_exponential(x, norms, bucket_size, bits, key, 0, words)
        add(f"encode_exponential, {bits} bits", k.encode_exponential,
            x, norms, bucket_size, bits, key, 0, words, targets=(target, 1.0))  # fmt: skip
        add(f"decode_exponential, {bits} bits", k.decode_exponential,
            [words], [norms], bucket_size, bits, 0.25, out, targets=(1.0, 0.9))  # fmt: skip
        add(f"decode_exponential, {bits} bits, n = {WORKERS}", k.decode_exponential,
            [words.copy() for _ in range(WORKERS)], [norms] * WORKERS, bucket_size, bits, 0.25, out,
            targets=(2.2, 1.1))  # fmt: skip

    # A payload as QSGD and NUQSGD send it: norms and codes, in memory that is new each time.
    batch, rounder = Batch((elements,), [0], [chain], [0], [x]), Rounder("worker")
    length = buckets(elements, bucket_size) + code_words(elements, 4)
    for levels, target in (("uniform", 1.7), ("exponential", 2.5)):
        for norm in ("max", "l2"):
            codec = CodeFormat(levels, 4, norm, bucket_size)
            add(f"norms and codes, {levels}, {norm}, 4 bits", segment_kernels(k).encode_codes,
                codec, batch, rounder, (0, length), targets=(target, 1.0))  # fmt: skip

    for bits in (1, 2, 3, 4):
        words, scales = k.encode_rotated(x, bits, own_key)
        add(f"encode_rotated, {bits} bits", k.encode_rotated,
            x, bits, own_key, 0, words, scales, targets=(5.0, 2.5, 4.0))  # fmt: skip
        add(f"decode_rotated, {bits} bits", k.decode_rotated,
            words, scales, bits, own_key, 0.25, out, targets=(4.4, 2.2, 3.5))  # fmt: skip
        messages = [words.copy() for _ in range(WORKERS)]
        add(f"add_rotated, {bits} bits, n = {WORKERS}", k.add_rotated,
            messages, [scales] * WORKERS, bits, [own_key] * WORKERS, 0.25, out)  # fmt: skip
        add(f"encode_rotated, {bits} bits, trellis", k.encode_rotated,
            x, bits, own_key, 0, words, scales, True)  # fmt: skip
        add(f"decode_rotated, {bits} bits, trellis", k.decode_rotated,
            words, scales, bits, own_key, 0.25, out, 0, True)  # fmt: skip

    steps, signs = np.full(tiles(elements), 0.1, np.float32), RngKey(0, "benchmark").key("rotation", 0)
    add("rotated_samples, 8 a bucket", k.rotated_samples, x, 8, signs)
    for width in (4, 8):
        words, checks = k.encode_rotated_sum(x, steps, width, signs, key)
        add(f"encode_rotated_sum, {width} bits", k.encode_rotated_sum,
            x, steps, width, signs, key, 0, words, checks)  # fmt: skip
        add(f"rotated_sum_checks, {width} bits", k.rotated_sum_checks, words, width, elements)
        add(f"decode_rotated_sum, {width} bits", k.decode_rotated_sum,
            words, steps, width, signs, 0.25, out)  # fmt: skip

    momentum, scale = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
    signs = np.zeros(tiles(elements) * ROW, np.int32)
    k.binarize(x, momentum, scale, 0.9, own_key, 0, signs)
    votes = [signs.copy() for _ in range(WORKERS)]
    add("binarize", k.binarize, x, momentum, scale, 0.9, own_key, 0, signs, targets=(3.5, 2.8))
    add(f"vote, n = {WORKERS}", k.vote, votes, own_key, 0, signs, targets=(1.5, 0.8))
    add("decode_signs", k.decode_signs, signs, 0.25, out, targets=(1.5, 0.8))

    for percent in (1, 10, 30):
        digits = np.where(rng.random(elements) < percent / 100, rng.integers(1, 8, elements, np.int32), 0)
        digits = (digits * rng.choice(np.array([-1, 1], np.int32), elements)).astype(np.int32)
        for code in ("gamma", "omega"):
            words = k.pack_codes(k.codes_of_digits(digits, 4), 4)
            stream = k.elias_encode_codes(words, 4, elements, code)
            add(f"elias_encode_codes, {code}, {percent}% non-zero", k.elias_encode_codes,
                words, 4, elements, code)  # fmt: skip
            add(f"elias_decode_codes, {code}, {percent}% non-zero", k.elias_decode_codes,
                stream, elements, 4, code, words.copy())  # fmt: skip
    return found


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the CPU time of one call.

    On a busy machine, the time that other processes take does not count.
    """
    begin = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - begin) / repeats


def measure(size: str, isa: str, selected: list[Case], rounds: int) -> list[dict[str, Any]]:
    """Time all cases in each round.

    Ratios are taken within a round, and so are robust to changes of the machine's load.
    """
    repeats = {case.name: 1 + int(MIN_SECONDS / seconds(case.call, 1)) for case in selected}
    times: dict[str, list[float]] = {case.name: [] for case in selected}
    for _ in range(rounds):
        for case in selected:
            seconds(case.call, repeats[case.name])  # warms the caches after the case before
            times[case.name].append(seconds(case.call, repeats[case.name]))

    def ratio(name: str, to: str) -> float:
        return median(a / b for a, b in zip(times[name], times[to]))

    return [
        {
            "kernel": case.name,
            "instruction_set": isa,
            "size": size,
            "elements": SIZES[size],
            "milliseconds": 1e3 * median(times[case.name]),
            "gigabytes_per_second": 4e-9 * SIZES[size] / median(times[case.name]),
            "times_memcpy": ratio(case.name, MEMCPY),
            "times_fp16_cast": ratio(case.name, FP16_CAST),
            "target": case.target(size, isa),
        }
        for case in selected
    ]


def print_table(console: Console, size: str, measured: dict[str, list[dict[str, Any]]]) -> None:
    """Print a table of the kernels.

    Args:
        measured: the results of each instruction set.
    """
    table = Table(title=f"{size} elements, time per call")
    table.add_column("kernel")
    for isa in measured:
        for column in ("ms", "x fp16 cast", "x memcpy", "target"):
            table.add_column(f"{column}\n{isa}", justify="right")
    for results in zip(*measured.values()):
        table.add_row(results[0]["kernel"], *(cell for result in results for cell in cells(result)))
    console.print(table)


def cells(result: dict[str, Any]) -> list[str]:
    target, ratio = result["target"], f"{result['times_memcpy']:.2f}"
    missed = target is not None and result["times_memcpy"] > target
    return [
        f"{result['milliseconds']:.3f}",
        f"{result['times_fp16_cast']:.2f}",
        f"[red]{ratio}[/red]" if missed else ratio,
        "" if target is None else f"{target:.1f}",
    ]


def on_cpu(console: Console, arguments: Any, parser: argparse.ArgumentParser) -> tuple[str, list]:
    sizes = chosen_sizes(arguments, SIZES, parser)
    backend = kernels.get(arguments.kernels)
    isas = [arguments.kernels]
    if arguments.kernels == "native":
        available = native_library.loaded().available
        isas = arguments.isa or list(available[1:] or available)[::-1]
    console.print(f"{kernels.describe()}; {platform.processor() or platform.machine()}")
    results = []
    for size in sizes:
        elements = SIZES[size]
        selected = baselines(elements)
        selected += [
            case
            for case in cases(backend, elements, arguments.bucket_size)
            if any(only in case.name for only in arguments.only)
        ]
        measured = {}
        for isa in isas:
            if backend is native:
                native_library.loaded().use(isa)
            measured[isa] = measure(size, isa, selected, arguments.rounds)
        print_table(console, size, measured)
        results += [result for found in measured.values() for result in found]
    return kernels.describe(), results


def on_gpu(console: Console, arguments: Any, parser: argparse.ArgumentParser) -> tuple[str, list]:
    interpreted = arguments.device == "interpreter"
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        parser.error(f"--device {arguments.device}: {error}; pip install torch triton")
    if not interpreted and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device")
    import cuda_kernels

    known = cuda_kernels.INTERPRETED_SIZES if interpreted else cuda_kernels.SIZES
    sizes, description = chosen_sizes(arguments, known, parser), f"Triton kernels on {cuda_kernels.where()}"
    results = cuda_kernels.run(
        console, sizes, arguments.bucket_size, arguments.only, arguments.rounds,
        lambda found: write_json(arguments.json, description, found),
    )  # fmt: skip
    return description, results


def chosen_sizes(arguments: Any, known: Collection[str], parser: argparse.ArgumentParser) -> Collection[str]:
    unknown = sorted(set(arguments.sizes or ()) - set(known))
    if unknown:
        parser.error(f"--sizes: {', '.join(unknown)}; use some of {', '.join(known)}")
    return arguments.sizes or known


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time the kernels against memcpy and the cast to float16.")
    parser.add_argument(
        "--kernels", default="native", choices=sorted(kernels.BACKENDS), help="backend to time"
    )
    parser.add_argument(
        "--isa",
        nargs="+",
        choices=native_library.INSTRUCTION_SETS,
        help="instruction sets of the native kernels",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "interpreter"),
                        help="where to time kernels")  # fmt: skip
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help="numbers of elements, such as 1M")
    parser.add_argument("--bucket-size", type=int, default=1024, help="number of elements that share a norm")
    parser.add_argument("--only", nargs="+", default=[""], help="kernels whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each kernel")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    return parser


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    on_device = on_cpu if arguments.device == "cpu" else on_gpu
    description, results = on_device(Console(), arguments, parser)
    write_json(arguments.json, description, results)


def write_json(path: str | None, description: str, results: list[dict[str, Any]]) -> None:
    if path is not None:
        with open(path, "w") as file:
            json.dump({"kernels": description, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
