"""The Triton kernels for many gradients at once have the bits of the kernels for one, in as few launches."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ON_GPU = torch.cuda.is_available()

with pytest.MonkeyPatch.context() as at_import:
    if not ON_GPU:
        at_import.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    from horovod_quant.kernels import triton as kernels
    from horovod_quant.kernels.triton import each, launching, staging
    from horovod_quant.kernels.triton.jobs import Rows, layout_of
    from horovod_quant.kernels.triton.table import SegmentTable

from horovod_quant.kernels.keys import RngKey, joint_keys_of  # noqa: E402
from horovod_quant.kernels.layout import ROW, TILE, buckets, ceil_div, code_words, sum_words, tiles  # noqa: E402
from horovod_quant.kernels.rotation import rotated_elements  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LENGTHS = (1, 2100, 0, 1025, 33)
STEP = 7
RANK, SIZE = 1, 3
FACTOR = 0.25
SEGMENTS = kernels.segments


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture(params=["float32", "mixed"])
def x(request: pytest.FixtureRequest) -> list[Any]:
    """Gradients; mixed ones have several types, and one does not begin at a multiple of 16 bytes."""
    rng = np.random.default_rng(3)
    found = [torch.from_numpy(rng.standard_normal(n + 1).astype(np.float32)).to(DEVICE) for n in LENGTHS]
    if request.param == "float32":
        return [each[:-1].clone() for each in found]
    types = [torch.float16, torch.float32, torch.float32, torch.bfloat16, torch.float32]
    return [own[1:] if i == 1 else own[:-1].to(types[i]) for i, own in enumerate(found)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    launch = launching.Kernel.__call__

    def count(self, jobs, constants):
        found.append(self.function.__name__)
        launch(self, jobs, constants)

    monkeypatch.setattr(launching.Kernel, "__call__", count)
    return found


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    upload = staging.upload

    def count(tables, *arguments):
        found.append(len(tables))
        return upload(tables, *arguments)

    monkeypatch.setattr(staging, "upload", count)
    return found


CHAINS = [RngKey(0, str(i)) for i in range(len(LENGTHS))]
STARTS = [0, TILE, 0, 3 * TILE, 2**35 * TILE]
STEPS = [STEP + i for i in range(len(LENGTHS))]


def batch_of(x: list[Any]) -> Any:
    return SimpleNamespace(
        values=x, elements=tuple(map(len, x)), starts=STARTS, chains=CHAINS, steps=STEPS, table=None
    )


def outs_like(x: list[Any]) -> list[Any]:
    return [torch.zeros_like(own) for own in x]


def assert_same(one: Any, other: Any, what: str = "") -> None:
    assert one.dtype == other.dtype
    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), what


def assert_all_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for i, (a, b) in enumerate(zip(one, other)):
        assert_same(a, b, str(i))


@pytest.mark.parametrize("bucket", [96, 4096])
def test_sums(x: list[Any], bucket: int, launches: list[str]) -> None:
    table = SegmentTable(x)
    counts = [buckets(len(own), bucket) for own in x]
    words_in = [sum_words(len(own), 4) for own in x]
    norms = each.bucket_maxima_each(table, bucket)
    out = torch.empty(sum(words_in), dtype=torch.int32, device=DEVICE)
    found = outs_like(x)
    each.encode_uniform_sum_each(
        table, norms, bucket, 5, 4, joint_keys_of(CHAINS, "worker", STEPS, RANK, SIZE), STARTS, out
    )
    at, norm_at = ([0, *np.cumsum(lengths).tolist()] for lengths in (words_in, counts))
    SEGMENTS.decode_sums(bucket, 5, 4, out, at, norms, norm_at, range(len(x)), FACTOR, found)
    some = SEGMENTS.decode_sums(bucket, 5, 4, out, at, norms, norm_at, [3, 1], FACTOR, outs_like(x)[3:0:-2])
    assert len(launches) == 2 * len(table.groups) + len(SegmentTable(found).groups) + len(
        SegmentTable(some).groups
    )
    rounder = SimpleNamespace(domain="worker", rank=RANK, size=SIZE)
    segments = batch_of(x)
    assert_same(SEGMENTS.norms("max", bucket, segments), norms)
    again = SEGMENTS.encode_sums(bucket, 5, 4, segments, rounder, norms, norm_at)
    assert_same(again[:-1], out)
    assert int(again[-1]) == 1

    expected = outs_like(x)
    for i, (own_norms, own_words) in enumerate(zip(norms.split(counts), out.split(words_in))):
        assert_same(own_norms, kernels.bucket_maxima(x[i], bucket))
        key = CHAINS[i].joint("worker", STEPS[i], RANK, SIZE)
        words = kernels.encode_uniform_sum(x[i], own_norms, bucket, 5, 4, key, STARTS[i])
        assert_same(own_words, words)
        kernels.decode_uniform_sum(words, own_norms, bucket, 5, 4, FACTOR, expected[i])
    assert_all_same(found, expected)
    assert_all_same(some, [expected[3], expected[1]])


@pytest.mark.parametrize(("norm", "levels"), [("max", "uniform"), ("l2", "exponential")])
def test_codes(x: list[Any], norm: str, levels: str, uploads: list[int], launches: list[str]) -> None:
    bucket, bits = 96, 4
    lengths = [buckets(len(own), bucket) + code_words(len(own), bits) for own in x]
    at = [0, *np.cumsum(lengths).tolist()]
    rounder = SimpleNamespace(domain="worker", rank=RANK, size=0)
    segments = batch_of(x)
    payload = SEGMENTS.encode_codes(levels, norm, bucket, bits, segments, rounder, at)
    assert len(uploads) == 1
    kinds = len(segments.table.groups)
    assert len(launches) == 2 * kinds + (norm == "l2")
    found = outs_like(x)
    SEGMENTS.decode_codes(levels, bucket, bits, [payload, payload], at, FACTOR, found)
    assert len(uploads) == 2

    encode = kernels.encode_uniform_codes if levels == "uniform" else kernels.encode_exponential
    decode = kernels.decode_uniform_codes if levels == "uniform" else kernels.decode_exponential
    expected = outs_like(x)
    for i, own in enumerate(payload.split(lengths)):
        if norm == "max":
            norms = kernels.bucket_maxima(x[i], bucket)
        else:
            norms = kernels.norms_of_square_sums(kernels.bucket_square_sums(x[i], bucket))
        words = encode(x[i], norms, bucket, bits, CHAINS[i].key("worker", STEPS[i], RANK), STARTS[i])
        assert_same(own[: len(norms)].view(torch.float32), norms)
        assert_same(own[len(norms) :], words)
        decode([words, words], [norms, norms], bucket, bits, FACTOR, expected[i])
    assert_all_same(found, expected)


@pytest.mark.parametrize("trellis", [False, True])
def test_rotated(x: list[Any], trellis: bool, uploads: list[int], launches: list[str]) -> None:
    bits = 3
    codes = [code_words(rotated_elements(len(own)), bits) for own in x]
    lengths = [min(len(own), 1) + words + tiles(len(own)) for own, words in zip(x, codes)]
    at = [0, *np.cumsum(lengths).tolist()]
    segments = batch_of(x)
    rounder = SimpleNamespace(domain="worker", rank=0, size=0)
    payload = SEGMENTS.encode_rotated(bits, trellis, segments, rounder, at)
    assert len(uploads) == 1
    assert len(launches) == (2 if trellis else 1) + len(segments.table.groups)
    words = SEGMENTS.step_words(payload, at, segments.elements)
    server = SimpleNamespace(domain="server", rank=0, size=0)
    again = SEGMENTS.encode_rotated(bits, trellis, batch_of(x), server, at, words)
    found = outs_like(x)
    SEGMENTS.decode_rotated(bits, trellis, segments, "worker", [payload, payload], at, FACTOR, found)

    expected = outs_like(x)
    for i, (own, own_again) in enumerate(zip(payload.split(lengths), again.split(lengths))):
        if not len(x[i]):
            continue
        for piece, domain in ((own, "worker"), (own_again, "server")):
            assert int(piece[0]) == STEPS[i]
            key = CHAINS[i].key(domain, STEPS[i], 0)
            words, scales = kernels.encode_rotated(x[i], bits, key, STARTS[i], trellis=trellis)
            assert_same(piece[1 : 1 + codes[i]], words)
            assert_same(piece[1 + codes[i] :].view(torch.float32), scales)
        words, scales = own[1 : 1 + codes[i]], own[1 + codes[i] :].view(torch.float32)
        keys = [CHAINS[i].key("worker", STEPS[i], rank) for rank in range(2)]
        kernels.add_rotated([words] * 2, [scales] * 2, bits, keys, FACTOR, expected[i], STARTS[i], trellis)
    assert_all_same(found, expected)


def test_bits(x: list[Any], uploads: list[int]) -> None:
    x[1][0] = float("nan")
    states = [[torch.full([len(own)], 0.5, device=DEVICE) for own in x] for _ in range(4)]
    counts = [tiles(len(own)) for own in x]
    lengths = [ROW * count + ceil_div(count, ROW) for count in counts]
    at = [0, *np.cumsum(lengths).tolist()]
    segments = batch_of(x)
    segments.states = [(states[0][i], states[1][i], 0.9) for i in range(len(x))]
    rounder = SimpleNamespace(domain="worker", rank=RANK, size=0)
    payload = SEGMENTS.binarize(segments, rounder, at)
    other = torch.zeros_like(payload)
    voted = SEGMENTS.vote([payload, payload, other], segments, rounder, at)
    assert len(uploads) == 2
    found, expected = outs_like(x), outs_like(x)
    SEGMENTS.decode_signs(voted, segments, at, FACTOR, found)
    assert len(uploads) == 3
    for i, (own, own_vote) in enumerate(zip(payload.split(lengths), voted.split(lengths))):
        key = CHAINS[i].key("worker", STEPS[i], RANK)
        words, flags = kernels.binarize(x[i], states[2][i], states[3][i], 0.9, key, STARTS[i])
        packed = kernels.pack_flags(flags)
        assert_same(own, torch.cat([words, packed]))
        vote = kernels.vote([words, words, torch.zeros_like(words)], key, STARTS[i])
        assert_same(own_vote, torch.cat([vote, packed]))
        kernels.with_nan_tiles(kernels.decode_signs(vote, FACTOR, expected[i]), flags)
    assert_all_same(found, expected)
    assert_all_same(states[0] + states[1], states[2] + states[3])
    assert bool(torch.isnan(found[1]).any())


def test_nothing() -> None:
    rounder = SimpleNamespace(domain="worker", rank=0, size=0)
    nothing = SimpleNamespace(values=[], elements=(), starts=[], chains=[], steps=[], states=[], table=None)
    empty = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert len(SEGMENTS.encode_codes("uniform", "max", 32, 4, nothing, rounder, [0])) == 0
    assert len(SEGMENTS.encode_rotated(2, False, nothing, rounder, [0])) == 0
    assert len(SEGMENTS.binarize(nothing, rounder, [0])) == 0
    assert len(SEGMENTS.vote([empty], nothing, rounder, [0])) == 0
    assert len(SEGMENTS.decode_signs(empty, nothing, [0], 1.0, [])) == 0
    assert len(SEGMENTS.decode_codes("uniform", 32, 4, [empty], [0], 1.0, [])) == 0
    assert len(SEGMENTS.decode_rotated(2, False, nothing, "worker", [empty], [0], 1.0, [])) == 0
    assert len(SEGMENTS.empty([])) == 0


def test_what_does_not_fit_is_refused() -> None:
    x = torch.ones(100, device=DEVICE)
    with pytest.raises(ValueError, match="not all tensors are contiguous"):
        SegmentTable([torch.ones(4, 4, device=DEVICE).t()])
    with pytest.raises(TypeError, match=r"x has dtype torch\.int32"):
        SegmentTable([x, x.to(torch.int32)])
    with pytest.raises(TypeError, match="not all are tensors"):
        SegmentTable([x, np.ones(3)])
    with pytest.raises(ValueError, match="norms: not all within 3 words"):
        SEGMENTS.decode_sums(32, 5, 4, x.to(torch.int32), [0], x[:3], [0], [0], 1.0, [x])
    with pytest.raises(ValueError, match="not all within"):
        each.bucket_maxima_each(SegmentTable([x]), 32, x, np.array([98]))


def rows_of(read: Any, written: Any) -> Rows:
    return Rows(layout_of((1,), 1), {}, DEVICE, read, written)


def test_what_rows_depend_on() -> None:
    one = rows_of([(np.array([100, 0]), np.array([110, 10]))], [(200, 300)])
    assert not one.meets(rows_of([(np.array([10, 110]), np.array([20, 120]))], [(300, 400)]))
    assert not one.meets(rows_of([(100, 110)], [(10, 100)]))
    assert one.meets(rows_of([], [(105, 106)]))
    assert one.meets(rows_of([(0, 1000)], []))
    assert one.meets(rows_of([], [(299, 300)]))
    assert not one.meets(rows_of([(5, 5)], [(250, 250)]))


def test_rows_that_touch_nothing_of_each_other_share_a_launch(
    launches: list[str], uploads: list[int]
) -> None:
    x = [torch.rand(3000, device=DEVICE) for _ in range(4)]
    with kernels.batch():
        maxima = [each.bucket_maxima_each(SegmentTable(x[i : i + 2]), 96) for i in (0, 2)]
        again = each.bucket_maxima_each(SegmentTable(maxima), 32)
        single = kernels.bucket_maxima(again, 32)
    assert launches == ["bucket_maxima"] * 3
    assert uploads == [3]
    assert float(single.max()) == max(float(own.max()) for own in x)


def test_a_captured_call_runs_nothing(launches: list[str]) -> None:
    x = torch.ones(100, device=DEVICE)
    assert len(launching.capture(lambda: kernels.bucket_maxima(x, 32))) == 1
    assert not launches
    assert os.environ.get("TRITON_INTERPRET") or ON_GPU
