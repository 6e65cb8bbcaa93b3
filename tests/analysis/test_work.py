"""What a worker does: bytes and kernel calls are those of the schemes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from helpers import SCHEMES, owned_states, used_states
from literature import LITERATURE

from horovod_quant import simulator
from horovod_quant.analysis.kernel_speeds import measure_kernels
from horovod_quant.analysis.work import Call, work_of
from horovod_quant.schemes import EDEN, NUQSGD, QSGD, BinSGDM, GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import LOCAL, Allgather, Collective, Decoded, Scheme, Workers
from horovod_quant.transports.traffic import ring_allreduce_bytes, sent_bytes

FIXED = {
    name: scheme
    for name, scheme in {**SCHEMES, **LITERATURE}.items()
    if getattr(scheme, "coding", "fixed") == "fixed"
}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", FIXED)
def test_bytes_are_those_of_the_simulator(name: str, size: int) -> None:
    lengths = (3000, 1, 0, 1024, 5000)
    gradients = [[np.ones(length, np.float32) for length in lengths] for _ in range(size)]
    states = [used_states(own) for own in gradients]
    simulated = simulator.run(FIXED[name], gradients, states=states)
    found: dict[str, float] = {}
    for _, asked in work_of(FIXED[name], lengths, size).stages:
        kind = type(asked).__name__.lower()
        found[kind] = found.get(kind, 0.0) + sum(sent_bytes(asked, size))
    assert found == pytest.approx(simulated.bytes_sent)


@pytest.mark.parametrize("coding", ["elias", "elias-omega"])
def test_elias_coding_sends_no_more_than_the_model_says(coding: str) -> None:
    scheme = QSGD(4, coding=coding)
    gradients = [np.random.default_rng(rank).standard_normal(50_000) for rank in range(3)]
    modelled = sum(sum(sent_bytes(asked, 3)) for _, asked in work_of(scheme, (50_000,), 3).stages)
    assert simulator.run(scheme, gradients).bytes_sent["allgather"] <= modelled + 2 * 8


def test_kernel_calls_are_those_of_the_scheme() -> None:
    stages, decode = work_of(GlobalQSGD(8), (3000, 2000), 4)
    assert [calls for calls, _ in stages] == [
        [Call("bucket_maxima", 0, 5000)],
        [Call("encode_uniform_sum", 8, 5000)],
    ]
    assert decode == [Call("decode_uniform_sum", 8, 5000)]
    stages, decode = work_of(LITERATURE["terngrad"], (3000, 2000), 4)
    (before_scales, scales), (before_words, _) = stages
    assert scales.array.shape == (2,)
    assert before_scales == [
        Call("tensor_deviation", 0, 5000),
        Call("scale", 0, 4),
        Call("less", 0, 5000),
        Call("minimum", 0, 5000),
        Call("where", 0, 5000),
        Call("bucket_maxima", 0, 5000),
    ]
    assert before_words == [Call("encode_uniform_sum", 4, 5000)]
    assert decode == [Call("decode_uniform_sum", 4, 5000)]
    stages, decode = work_of(EDEN(3), (3000, 2000), 2)
    assert [calls for calls, _ in stages] == [[Call("encode_rotated", 3, 5000)]]
    assert decode == [Call("add_rotated", 3, 5000, 2)]
    stages, decode = work_of(EDEN(2, server_bits=4), (16 * 1024,), 4)
    assert [calls for calls, _ in stages] == [
        [Call("encode_rotated", 2, 16384)],
        [Call("add_rotated", 2, 4096, 4), Call("encode_rotated", 4, 4096)],
    ]
    assert decode == [Call("decode_rotated", 4, 16384)]
    stages, decode = work_of(EDEN(3, trellis=True), (3000, 2000), 2)
    assert [calls for calls, _ in stages] == [[Call("encode_rotated_trellis", 3, 5000)]]
    assert decode == [Call("add_rotated_trellis", 3, 5000, 2)]
    stages, decode = work_of(GlobalQSGD(8, rotate=True), (3000, 2000), 4)
    (before_norms, norms), (before_words, words), (before_more, more) = stages
    # Of 3 and 2 buckets 43 and 64 coordinates each.
    assert norms.array.shape == (3 + 3 * 43 + 2 + 2 * 64,)
    assert before_norms == [Call("bucket_square_sums", 0, 5000), Call("rotated_samples", 0, 5000)]
    assert words.array.shape == (3072 // 4 + 3 + 2048 // 4 + 2 + 1,)
    assert before_words == [Call("encode_rotated_sum", 8, 5000)]
    assert more.array.shape == (1,)
    assert before_more == [Call("rotated_sum_checks", 8, 5000)]
    assert decode == [Call("decode_rotated_sum", 8, 5000)]
    stages, decode = work_of(BinSGDM(), (4 * 1024,), 4)
    assert [calls for calls, _ in stages] == [[Call("binarize", 0, 4096)], [Call("vote", 0, 1024, 4)]]
    assert decode == [Call("decode_signs", 0, 4096)]
    stages, decode = work_of(BinSGDM(server_bits=3), (4 * 1024,), 4)
    assert [calls for calls, _ in stages] == [
        [Call("binarize", 0, 4096)],
        [
            Call("decode_signs", 0, 4096),  # of 4 workers each
            Call("mean", 0, 1024, 4),
            Call("encode_uniform_codes", 3, 1024),
        ],
    ]
    assert decode == [Call("decode_uniform_codes", 3, 4096)]


@dataclass(frozen=True)
class Foreign(Scheme):
    """One that gives kernels no place for their results, and calls one that the model does not know."""

    collectives = (Collective(Allgather, "int32"),)

    def begin(self, gradients, workers, kernels):
        (gradient,) = gradients
        norms = kernels.bucket_maxima(gradient.values, 1024)
        key = gradient.keys.key("worker", gradient.step, workers.rank)
        codes = kernels.encode_uniform_codes(gradient.values, norms, 1024, 2, key)
        values = kernels.clip(gradient.values, 100.0)
        signs = kernels.encode_exponential(values, norms, 1024, 4, key)
        parts = [(len(each), np.int32, lambda out, each=each: each) for each in (codes, signs)]
        words = kernels.pack(parts)
        pieces = yield Allgather(words, [4 * len(words)])

        def write(i, factor, out):
            own = [piece[: len(codes)] for piece in pieces]
            return kernels.decode_uniform_codes(own, [norms] * workers.size, 1024, 2, factor, out)

        return Decoded(workers.size, write)


def test_another_packages_scheme_is_modelled_and_measured() -> None:
    found = work_of(Foreign(), (5000,), 3)
    simulated = simulator.run(Foreign(), [np.ones(5000, np.float32)] * 3)
    ((calls, request),) = found.stages
    assert sum(sent_bytes(request, 3)) == simulated.bytes_sent["allgather"]
    assert Call("clip", 0, 5000) in calls
    speeds = measure_kernels([Foreign()], seconds=0.01)
    assert speeds.seconds(found.calls) > 0
    assert speeds.seconds(found.calls) > 0


def test_a_hierarchical_exchange_by_hand() -> None:
    """2 hosts of 4: float32 on the way in, a quarter of the integers between, and all of them, with norms and head
    counts, on the way out; each request in its group.
    """
    stages, decode = work_of(Hierarchical(GlobalQSGD(8)), (4 * 4096,), 8, 4)
    assert [(type(asked).__name__, asked.group) for _, asked in stages] == [
        ("Alltoall", "local"),
        ("Allreduce", "cross"),
        ("Allreduce", "cross"),
        ("Allgather", "local"),
    ]
    assert [sum(asked.parts) for _, asked in stages] == [4 * 4 * 4096, 4 * 4, 4096, 4096 + 4 * 4 + 4]
    assert Call("mean", 0, 4096, 4) in stages[1][0]
    assert decode == [Call("decode_uniform_sum", 8, 4 * 4096)]
    stages, decode = work_of(Hierarchical(QSGD(4, exchange="allgather")), (4 * 4096,), 32, 4)
    assert [sum(asked.parts) for _, asked in stages[2:]] == [4 * 4096]
    assert Call("decode_uniform_codes", 4, 4096, 8) in stages[2][0]
    assert decode == [Call("scale", 0, 4 * 4096)]


@pytest.mark.parametrize("name", FIXED)
def test_bytes_inside_a_host_are_those_of_the_simulator(name: str) -> None:
    lengths, size, local_size = (3000, 1, 0, 1024, 5000), 4, 2
    scheme = Hierarchical(FIXED[name])
    gradients = [[np.ones(length, np.float32) for length in lengths] for _ in range(size)]
    workers = [Workers(rank, size, local_size=local_size) for rank in range(size)]
    states = [owned_states(scheme, own, worker) for own, worker in zip(gradients, workers)]
    simulated = simulator.run(scheme, gradients, states=states, local_size=local_size).bytes_sent
    for _, asked in work_of(scheme, lengths, size, local_size).stages:
        if asked.group == LOCAL:
            kind = f"local {type(asked).__name__.lower()}"
            assert sum(sent_bytes(asked, local_size)) == pytest.approx(simulated[kind])


def test_hierarchical_on_hosts_of_one_worker_is_flat() -> None:
    nested, flat = (work_of(scheme, (5000,), 4) for scheme in (Hierarchical(QSGD(4)), QSGD(4)))
    assert nested.calls == flat.calls
    assert [asked.parts for _, asked in nested.stages] == [asked.parts for _, asked in flat.stages]


README_ROWS = re.findall(
    r"^\| `(\w+\([^`]*\))`[^|]*\| ([\d., ]+) \|",
    (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
"""A method, and what its traffic is divided by with 4, 16 and 64 workers."""


@pytest.mark.parametrize(("code", "ratios"), README_ROWS)
def test_the_traffic_that_the_readme_promises(code: str, ratios: str) -> None:
    own = {kind.__name__: kind for kind in (EDEN, NUQSGD, QSGD, BinSGDM, GlobalQSGD)}
    scheme, elements = eval(code, own), 2**24
    for ratio, size in zip(map(float, ratios.split(", ")), (4, 16, 64)):
        sent = sum(sum(sent_bytes(asked, size)) for _, asked in work_of(scheme, (elements,), size).stages)
        assert ring_allreduce_bytes(4 * elements, size) / sent == pytest.approx(ratio, abs=0.051), size


def test_the_readme_has_the_default_of_every_method() -> None:
    assert {"GlobalQSGD()", "QSGD()", "NUQSGD()", "EDEN()", "BinSGDM()"} <= {code for code, _ in README_ROWS}
