"""The Triton kernels return the reference's bits: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
ON_GPU = torch.cuda.is_available()


def interpret(patch: pytest.MonkeyPatch) -> None:
    """Triton reads it when it is imported, when a kernel is made, and when the first one runs."""
    if not ON_GPU:
        patch.setenv("TRITON_INTERPRET", "1")


with pytest.MonkeyPatch.context() as at_import:
    interpret(at_import)
    pytest.importorskip("triton")
    from horovod_quant.kernels import triton as kernels
    from horovod_quant.kernels.triton import compiling, each, launching, table
    from horovod_quant.kernels.triton.jobs import Rows, layout_of
    from horovod_quant.kernels.triton.ranges import Ranges
    from horovod_quant.kernels.triton.table import SegmentTable

from conformance import suite  # noqa: E402
from conformance.exchanges import ON_DEVICES, assert_exchanges_conform, exchanged, setting_of  # noqa: E402
from conformance.refusals import assert_refused  # noqa: E402
from conformance.suite import BFLOAT16, assert_same_bits, numbers  # noqa: E402
from helpers import by_default  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from horovod_quant.kernels.formats import CodeFormat  # noqa: E402
from horovod_quant.kernels.keys import RngKey  # noqa: E402
from horovod_quant.kernels.segments import Batch, Rounder  # noqa: E402
from horovod_quant.schemes.base import BinaryState, Gradient, Workers  # noqa: E402
from horovod_quant.torch.device import DeviceMemory  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        yield


def test_kernels_run_where_they_can() -> None:
    assert kernels.INTERPRETED != ON_GPU


# ---- the suite


class Triton(suite.Backend):
    """The backend; its calls are run one by one, or collected and launched together.

    Args:
        together: which.
        offset: of every other tensor in its memory: with 0 they begin at multiples of 16 bytes.
    """

    array_type = torch.Tensor

    def __init__(self, together: bool = False, offset: int = 0) -> None:
        super().__init__(kernels)
        self._together = together
        self._offsets = itertools.cycle([0, offset])

    def array(self, x: np.ndarray) -> Any:
        offset = next(self._offsets)
        x = np.concatenate([np.zeros(offset, x.dtype), x]) if offset else x.copy()
        if x.dtype == BFLOAT16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(DEVICE)[offset:]
        return torch.from_numpy(x).to(DEVICE)[offset:]

    def numpy(self, array: Any) -> np.ndarray:
        array = array.cpu()
        if array.dtype == torch.bfloat16:
            return array.view(torch.int16).numpy().view(BFLOAT16)
        return array.numpy()

    def run(self, cases: Sequence[suite.Case]) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        with kernels.batch() if self._together else contextlib.nullcontext():
            called = [self.called(case.kernel, case.arguments) for case in cases]
        for result, arguments in called:
            yield self.read(result), self.read(arguments)


BACKEND = Triton()


@pytest.mark.parametrize(("topic", "number"), numbers("triton"))
def test_kernels_conform(topic: str, number: int) -> None:
    suite.assert_conforms(Triton(together=number % 2 == 1), topic, number)


@pytest.mark.parametrize("number", by_default([0], range(8)))
@pytest.mark.parametrize("topic", ["uniform_codes", "binarize", "segments_of_codes", "segments_of_bits"])
def test_kernels_take_tensors_that_do_not_begin_at_whole_vectors(topic: str, number: int) -> None:
    suite.assert_conforms(Triton(offset=1), topic, number)


def test_every_kernel_is_compared() -> None:
    suite.assert_all_are_compared(
        BACKEND, rf"{kernels.__name__}\..*", "batch", "empty", "key_of_word", "pack"
    )


def test_arguments_that_do_not_fit_are_refused() -> None:
    assert_refused(BACKEND)


FEW_EXCHANGES = [
    "qsgd",
    "exponential-max",
    "terngrad",
    "hierarchical-binsgdm",
    "hierarchical-binsgdm-average",
]


@pytest.mark.parametrize("name", by_default(FEW_EXCHANGES, ON_DEVICES))
def test_whole_exchanges(name: str) -> None:
    assert_exchanges_conform(BACKEND, name)


# ---- compilation before the first launch


@pytest.mark.parametrize("name", by_default(FEW_EXCHANGES, ON_DEVICES))
def test_a_rehearsal_finds_all_kernels_and_launches_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, launch = set(), launching.Kernel.__call__

    def noted(kernel: Any, jobs: Any, constants: Any) -> None:
        launched.add((kernel, tuple(constants.items())))
        launch(kernel, jobs, constants)

    monkeypatch.setattr(launching.Kernel, "__call__", noted)
    scheme, local_size, groups, states = setting_of(name)
    memory, rehearsed = DeviceMemory(DEVICE, takes_tensors=True), set()
    for rank, (own, own_states) in enumerate(zip(groups, states)):
        arrays = [*own, *(array for state in own_states for array in state[:2])]
        tensors = list(map(BACKEND.array, arrays))
        kept = iter(tensors[len(own) :])
        gradients = [
            Gradient(tensor, RngKey(0, str(i)), 3, BinaryState(next(kept), next(kept), state.beta))
            for i, (tensor, state) in enumerate(zip(tensors, own_states))
        ]
        workers = Workers(rank, len(groups), local_size=local_size)
        rehearsed |= compiling.variants_of(partial(memory.rehearse, scheme, gradients, workers))
        suite.assert_all_same_bits(arrays, list(map(BACKEND.numpy, tensors)), name)
    assert not launched
    exchanged(BACKEND, name)
    assert launched == rehearsed


@pytest.mark.skipif(ON_GPU, reason="needs a replacement of Triton's driver, for compute capability 9.0")
def test_kernels_are_compiled_in_parallel_and_kept_on_disk(tmp_path: Path) -> None:
    program = [str(Path(__file__).with_name("triton_ahead.py"))]
    for _ in range(2):  # the second time they are loaded
        told = run_python(program, TRITON_CACHE_DIR=str(tmp_path)).stderr
        assert re.search(
            r"QSGD: 3 kernels compiled, or loaded from Triton's cache on disk, in \d+\.\d s", told
        )
        assert len(list(tmp_path.rglob("*.cubin"))) == 3


# ---- many tensors, one launch

SLOT = 64  # elements
CODEC = CodeFormat("uniform", 4, "max", 32)
calls = st.tuples(st.sampled_from(["scale", "maxima", "norms", "decode"]), *[st.integers(0, 4)] * 3)


def perform(program: Sequence[tuple], buffer: Any, payload: Any) -> list[Any]:
    """Read and write parts of a buffer, which touch or are the same; return what was read."""
    found = []
    for kind, *slots in program:
        one, two, three = parts = [buffer[SLOT * number : SLOT * (number + 1)] for number in slots]
        if kind == "scale":
            kernels.scale([one], 1.5, two)
        elif kind == "maxima":
            kernels.bucket_maxima(one, 32, two[:2])
        elif kind == "norms":
            chains = [RngKey(0, "w")] * 3
            found.append(
                kernels.segments.norms("max", 32, Batch((SLOT,) * 3, [0] * 3, chains, [0] * 3, parts))
            )
        else:
            outs = [one, three] if slots[0] != slots[2] else [one]
            kernels.segments.decode_codes(CODEC, [payload], [0, 34][: len(outs)], 0.5, outs)
    return found


@given(program=st.lists(calls, min_size=2, max_size=8))
def test_a_batch_does_what_its_calls_do_one_by_one(program: list[tuple]) -> None:
    """Its jobs wait for what they depend on: reading what was written, writing what is read, writing again."""
    x = np.random.default_rng(0).standard_normal(5 * SLOT).astype(np.float32)
    two = Batch((SLOT,) * 2, [0, 0], [RngKey(0, "w")] * 2, [0, 1], [BACKEND.array(x[:SLOT])] * 2)
    rounder = Rounder("worker")
    payload = kernels.segments.encode_codes(CODEC, two, rounder, [0, 34, 68])
    buffers = [BACKEND.array(x), BACKEND.array(x)]
    expected = perform(program, buffers[0], payload)
    with kernels.batch():
        found = perform(program, buffers[1], payload)
    for one, other in zip([buffers[0], *expected], [buffers[1], *found]):
        assert_same_bits(BACKEND.numpy(one), BACKEND.numpy(other), str(program))


def test_operations_of_pytorch_find_what_was_collected() -> None:
    x = torch.full([100], 2.0, device=DEVICE)
    flags = torch.ones(40, dtype=torch.bool, device=DEVICE)
    with kernels.batch():
        maxima = kernels.bucket_maxima(x, 32)
        assert kernels.concatenate([maxima, maxima]).tolist() == [2.0] * 8
        assert bool(torch.all(kernels.unpack_flags(kernels.pack_flags(flags), 40)))
        clipped = kernels.clip(kernels.to_float32(x, None), 10.0)
        local = kernels.scale([kernels.to_float32(x, None)], -1.0, kernels.empty(100))
        least = kernels.minimum(local, kernels.tensor_mean_magnitude(local))
        chosen = kernels.where(kernels.less(local, 0.0), least, 0.0)
    assert clipped.tolist() == [1.0] * 100
    assert chosen.tolist() == [-2.0] * 100


def test_a_batch_that_fails_launches_nothing() -> None:
    x, out = torch.ones(100, device=DEVICE), torch.zeros(4, device=DEVICE)

    def fail() -> None:
        with kernels.batch():
            kernels.bucket_maxima(x, 32, out)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert not out.any()
    assert launching.capture(lambda: kernels.bucket_maxima(x, 32, out))
    assert not out.any()
    assert kernels.bucket_maxima(x, 32, out).all()


intervals = st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda pair: (pair[0], sum(pair)))


@given(added=st.lists(intervals), asked=st.lists(intervals, min_size=1))
def test_ranges(added: list, asked: list) -> None:
    ranges, members = Ranges(), set()
    for low, high in added:
        ranges.add(low, high)
        members.update(range(low, high))
    for low, high in asked:
        assert ranges.meets(low, high) == bool(members & set(range(low, high)))


def test_rows_that_depend_on_each_other() -> None:
    def rows_of(read: Any, written: Any) -> Rows:
        return Rows(layout_of((1,), 1), {}, DEVICE, read, written)

    one = rows_of([(np.array([100, 0]), np.array([110, 10]))], [(200, 300)])
    assert not one.meets(rows_of([(np.array([10, 110]), np.array([20, 120]))], [(300, 400)]))
    assert not one.meets(rows_of([(100, 110)], [(10, 100)]))
    assert one.meets(rows_of([], [(105, 106)]))
    assert one.meets(rows_of([(0, 1000)], []))
    assert one.meets(rows_of([], [(299, 300)]))
    assert not one.meets(rows_of([(5, 5)], [(250, 250)]))


# ---- what does not fit


def test_tensors_that_do_not_fit_are_refused() -> None:
    x, norms = torch.ones(100, device=DEVICE), torch.ones(4, device=DEVICE)
    words, chain = torch.zeros(512, dtype=torch.int32, device=DEVICE), RngKey(0, "w")
    key_of_word = kernels.key_of_word(chain, "worker", words[:1])
    for function, message in (
        (lambda: kernels.bucket_maxima(np.ones(3, np.float32), 32), "x is a ndarray"),
        (lambda: kernels.bucket_maxima(x[::2], 32), "flat and contiguous"),
        (lambda: kernels.encode_uniform_sum(x, norms, 32, 7, 4, key_of_word), "key is a KeyOfWord"),
        (lambda: kernels.key_of_word(chain, "worker", words), "512 words, where one has the step"),
        (lambda: kernels.key_of_word(chain, "worker", x[:1]), "word has dtype"),
        (lambda: kernels.pack([(3, np.int32, lambda out: words[:2])]), r"a part is torch.int32\[2\]"),
        (lambda: SegmentTable([torch.ones(4, 4, device=DEVICE).t()]), "not all tensors are contiguous"),
        (lambda: SegmentTable([x, x.to(torch.int32)]), r"x has dtype torch\.int32"),
        (lambda: SegmentTable([x, np.ones(3)]), "not all are tensors"),
        (lambda: each.bucket_norms("max", SegmentTable([x]), 32, x, np.array([98])), "not all within"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            function()


# ---- without Triton, and without its interpreter


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_what_to_install_is_said(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import horovod_quant.kernels.triton"
    done = run_python(["-c", code])
    assert done.returncode == 1
    assert done.stderr.strip().endswith("pip install torch triton")


@pytest.mark.skipif(ON_GPU, reason="on the CPU")
def test_tensors_in_the_hosts_memory_are_refused() -> None:
    code = "import torch; from horovod_quant.kernels import triton; triton.bucket_maxima(torch.ones(5), 32)"
    done = run_python(["-c", code])
    assert done.returncode == 1
    assert "TypeError: x is in the host's memory" in done.stderr


def run_python(arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess:
    """A process that may compile kernels."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )


# ---- compiled, without a GPU


@pytest.mark.extended
def test_compiled_kernels_round_each_operation(tmp_path: Path) -> None:
    """No fused multiply-add but by 1 or -1, nothing approximate or flushed to zero; vectors; nothing spilled."""
    script = str(Path(__file__).with_name("triton_builds.py"))
    done = run_python([script, "90"], TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    built = json.loads(done.stdout)
    assert not {label: spilled for label, (_, _, spilled, _) in built.items() if spilled}
    compiled = {label: instructions for label, (instructions, *_) in built.items()}
    for label, instructions in compiled.items():
        inexact = {name for name in instructions if FORBIDDEN.search(name)}
        if label.split()[0] in WITH_TRANSFORMS:
            # Butterflies within rows: each of 5 stages multiplies by its sign, which has a register.
            assert built[label][3] == 5, label
            inexact -= {"fma.rn.f32"}
        assert not inexact, f"{label}: {inexact}"
    names = Counter(label.split()[0] for label in compiled)
    assert names.keys() >= {kernel.function.__name__ for kernel in all_kernels()}
    for exact in ("div.rn.f32", "div.rn.f64", "sqrt.rn.f64"):
        assert any(exact in instructions for instructions in compiled.values())
    for kernel, instruction in {
        "bucket_maxima": "ld", "bucket_sums": "ld", "binarize": "st", "decode_signs": "st",
    }.items():  # fmt: skip
        moves = [
            instructions
            for label, instructions in compiled.items()
            if label.startswith(f"{kernel} ") and '"KIND": "float32", "ALIGNED": true' in label
            if kernel != "bucket_sums" or '"TERM": "square"' in label
        ]
        assert moves, kernel
        assert all(f"{instruction}.global.v4.b32" in each for each in moves), kernel
    # A bucket stays in a warp's registers: its threads exchange elements, and nothing goes through shared memory.
    for label, instructions in compiled.items():
        if label.split()[0] in WITH_TRANSFORMS:
            assert not [name for name in instructions if ".shared" in name], label


WITH_TRANSFORMS = ("encode_rotated", "rotate", "add_rotated")
FORBIDDEN = re.compile(r"\b(fma|mad)\..*f(16|32|64)|\.ftz|\.approx|\.full|\.sat|div\.r[zmp]")


def all_kernels() -> list[launching.Kernel]:
    modules = [
        importlib.import_module(f"horovod_quant.kernels.triton.{name}")
        for name in ("arrays", "functions", "rotated")
    ]
    return [
        value for module in modules for value in vars(module).values() if isinstance(value, launching.Kernel)
    ]


# ---- the benchmark


@pytest.mark.extended
def test_the_benchmarks_calls_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    cuda_kernels = importlib.import_module("cuda_kernels")
    for case in cuda_kernels.cases(3000, 96, DEVICE):
        case.call()
    x = torch.randn(3000, device=DEVICE)
    norms = kernels.bucket_maxima(x, 96)
    decoded = cuda_kernels.eager_decode(cuda_kernels.eager_encode(x, norms, 96, 7), norms, 96, 7, 3000)
    step = norms.repeat_interleave(96)[:3000] / 7
    assert bool(torch.all(torch.abs(decoded - x) <= step * 1.001))


@pytest.mark.extended
def test_the_benchmark_needs_a_gpu() -> None:
    script = str(ROOT / "benchmarks" / "kernels.py")
    done = run_python([script, "--device", "cuda", "--sizes", "1M", "--rounds", "1"])
    if ON_GPU:
        assert done.returncode == 0, done.stderr
        assert "bucket_maxima" in done.stdout
    else:
        assert done.returncode == 2
        assert "PyTorch sees no CUDA device" in done.stderr


def test_an_empty_copy_does_not_decide_how_later_ones_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_steps", {})
    words = torch.arange(1, 4, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    source, target = np.array([words.data_ptr()]), np.array([out.data_ptr()])
    each.copy_words(source, target, np.array([0]), (words, out[:0]))
    each.copy_words(source, target, np.array([3]), (words, out))
    assert out.tolist() == [1, 2, 3]


def test_a_bucket_that_needs_more_than_32_bits_has_no_norm() -> None:
    x = torch.empty(2**30 + 1, dtype=torch.float16, device=DEVICE)  # refused before any of it is read
    for norms in (kernels.bucket_maxima, kernels.bucket_square_sums):
        with pytest.raises(ValueError, match="on a GPU a bucket has at most 1073741824 elements"):
            norms(x, 2**40)
