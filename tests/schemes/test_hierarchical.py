from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pytest
from helpers import (
    LENGTHS,
    SCHEMES,
    assert_unbiased,
    gaussian,
    lockstep,
    owned_states,
    same_bits,
    simulate,
    used_states,
)
from literature import ScaledSign

from horovod_quant import simulator
from horovod_quant.frontends.policy import Policy
from horovod_quant.kernels import reference
from horovod_quant.kernels.keys import RngKey
from horovod_quant.reductions.shards import owned_range
from horovod_quant.schemes import EDEN, NUQSGD, QSGD, BinSGDM, GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import CROSS, LOCAL, BinaryState, Decoded, Exchange, Scheme, Workers

every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
LAYOUTS = [(4, 2), (6, 3), (6, 2), (8, 4)]  # workers, workers of a node
every_layout = pytest.mark.parametrize(("size", "local_size"), LAYOUTS)
MANY_LENGTHS = (*LENGTHS, 5000, 20_000)


def groups_of(size: int, lengths: tuple[int, ...] = MANY_LENGTHS) -> list[list[np.ndarray]]:
    return [[gaussian(100 * worker + i, d) for i, d in enumerate(lengths)] for worker in range(size)]


def node_means(groups: list, local_size: int) -> list:
    """The mean of each node's workers: added in their order, times the rounded inverse of their number."""
    inverse = np.float32(1 / local_size)
    nodes = [groups[first : first + local_size] for first in range(0, len(groups), local_size)]
    return [[reduce(np.add, same) * inverse for same in zip(*node)] for node in nodes]


# ---- what it is equal to


@every_scheme
@every_layout
def test_it_is_the_flat_exchange_of_the_nodes_means(scheme: Scheme, size: int, local_size: int) -> None:
    groups = groups_of(size)
    result = simulate(Hierarchical(scheme), groups, local_size=local_size, seed=3, step=7)
    expected = simulate(scheme, node_means(groups, local_size), seed=3, step=7)
    for own in result.decoded:
        assert all(map(same_bits, own, expected.decoded[0]))


@every_scheme
@pytest.mark.parametrize("size", [1, 3])
def test_with_one_worker_a_node_it_is_the_flat_exchange(scheme: Scheme, size: int) -> None:
    groups = groups_of(size)
    for factor in (None, 0.3, 1.0):
        result, expected = (simulate(s, groups, factor=factor) for s in (Hierarchical(scheme), scheme))
        assert all(map(same_bits, result.decoded[0], expected.decoded[0]))
        assert result.bytes_sent == expected.bytes_sent


@every_scheme
def test_a_single_node_quantizes_nothing(scheme: Scheme) -> None:
    groups = groups_of(3)
    result = simulate(Hierarchical(scheme), groups, local_size=3)
    assert set(result.bytes_sent) == {"local alltoall", "local allgather"}
    if isinstance(scheme, BinSGDM):
        expected = simulate(scheme, node_means(groups, 3)).decoded[0]
    else:
        expected = node_means(groups, 3)[0]
    for own in result.decoded:
        assert all(map(same_bits, own, expected))


@every_scheme
def test_both_backends_return_the_same_bits(scheme: Scheme) -> None:
    groups = groups_of(4)
    arguments: dict[str, Any] = {"local_size": 2, "seed": 1}
    if isinstance(scheme, BinSGDM):
        workers = [Workers(rank, 4, local_size=2) for rank in range(4)]
        arguments["states"] = [owned_states(Hierarchical(scheme), groups[w.rank], w) for w in workers]
    expected = simulate(Hierarchical(scheme), groups, **{**arguments, **_copied(arguments)})
    native = simulator.run(Hierarchical(scheme), groups, kernels="native", **arguments)
    assert all(map(same_bits, native.decoded[0], expected.decoded[0]))


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    if "states" not in arguments:
        return {}
    copy = [[BinaryState(m.copy(), s.copy(), beta) for m, s, beta in own] for own in arguments["states"]]
    return {"states": copy}


# ---- who owns what


@every_scheme
def test_a_group_of_tensors_is_exchanged_as_each_alone(scheme: Scheme) -> None:
    lengths = (5000, 33, 0, 1025, 1, 2048, 3000)
    groups, names = groups_of(4, lengths), [f"layer{i}.weight" for i in range(len(lengths))]
    together = simulate(Hierarchical(scheme), groups, local_size=2, names=names).decoded[0]
    for i, name in enumerate(names):
        alone = simulate(Hierarchical(scheme), [[own[i]] for own in groups], local_size=2, names=[name])
        assert same_bits(alone.decoded[0][0], together[i])


@pytest.mark.parametrize("elements", [0, 1, 1024, 5000, 10_000_000])
@pytest.mark.parametrize("owners", [1, 2, 3, 8])
def test_every_element_has_one_owner(elements: int, owners: int) -> None:
    for unit in (1024, 3072):
        ranges = [owned_range("w", elements, owners, owner, unit) for owner in range(owners)]
        assert sum(stop - start for start, stop in ranges) == elements
        inside = sorted(pair for pair in ranges if pair[0] < pair[1])
        assert all(start % unit == 0 for start, _ in inside)
        assert [start for start, _ in inside[1:]] == [stop for _, stop in inside[:-1]]
        counts = [stop - start for start, stop in ranges]
        assert max(counts) - min(counts) <= 2 * unit


def test_small_tensors_have_different_owners() -> None:
    owners = [
        next(owner for owner in range(4) if np.diff(owned_range(f"layer{i}", 100, 4, owner, 1024))[0])
        for i in range(100)
    ]
    assert set(owners) == {0, 1, 2, 3}


def test_the_state_of_binsgdm_is_that_of_the_nodes_means_shared_out() -> None:
    scheme, groups = Hierarchical(BinSGDM()), groups_of(4, (5000, 3000))
    workers = [Workers(rank, 4, local_size=2) for rank in range(4)]
    own = [owned_states(scheme, groups[worker.rank], worker) for worker in workers]
    flat = [used_states(mean) for mean in node_means(groups, 2)]
    for step in range(3):
        simulate(scheme, groups, local_size=2, states=own, step=step)
        simulate(BinSGDM(), node_means(groups, 2), states=flat, step=step)
    for worker in workers:
        for i, state in enumerate(own[worker.rank]):
            start, stop = scheme.owned(str(i), (5000, 3000)[i], worker)
            assert 0 < stop - start < (5000, 3000)[i]
            assert same_bits(state.momentum, flat[worker.node][i].momentum[start:stop])
            assert same_bits(state.scale, flat[worker.node][i].scale[start:stop])


# ---- error, bytes


@pytest.mark.parametrize(
    "scheme",
    [QSGD(4), QSGD(3, "max", 96), GlobalQSGD(4), GlobalQSGD(8, "l2"), GlobalQSGD(4, levels="exponential")],
    ids=str,
)
def test_it_is_unbiased(scheme: Any) -> None:
    workers = [gaussian(worker, scheme.bucket_size) for worker in range(4)]
    result = simulate(Hierarchical(scheme), [np.tile(g, 2000) for g in workers], local_size=2)
    norm = np.linalg.norm if scheme.norm == "l2" else lambda x: np.abs(x).max()
    largest = float(norm(np.concatenate(workers)))
    samples = result.decoded[0][0].reshape(2000, -1)
    assert_unbiased(samples, np.mean(np.array(workers, np.float64), axis=0), 2 * largest, largest * 2.0**-21)


def test_fewer_summands_have_more_levels() -> None:
    assert GlobalQSGD(8).levels_for(64) == 1
    assert GlobalQSGD(8).levels_for(8) == 15
    gradients = [gaussian(worker, 4096) for worker in range(64)]
    flat = simulate(GlobalQSGD(8), gradients).nmse
    assert simulate(Hierarchical(GlobalQSGD(8)), gradients, local_size=8).nmse < flat / 10
    with pytest.raises(ValueError, match="64 workers need bits >= 8"):
        simulate(GlobalQSGD(4), gradients)
    simulate(Hierarchical(GlobalQSGD(4)), gradients, local_size=16)
    with pytest.raises(ValueError, match="16 workers need bits >= 6"):
        simulate(Hierarchical(GlobalQSGD(4)), gradients, local_size=4)


def returned_bits(scheme: Any, nodes: int) -> float:
    """Of an element, as docs/hierarchical.md has it."""
    if isinstance(scheme, BinSGDM):
        return scheme.server_bits + 1 / 1024
    if isinstance(scheme, EDEN):
        widths = scheme.widths(nodes)
        gathered = widths.exchange == "allgather"
        return nodes * (widths.bits + 32 / 1024) if gathered else widths.server_bits + 32 / 1024
    if isinstance(scheme, GlobalQSGD):
        width = 32 / (32 // scheme.bits) if scheme.levels == "uniform" else scheme.bits
        return 32 if scheme.rotate else width + 32 / scheme.bucket_size
    own = (getattr(scheme, "server_bits", None) or scheme.bits) + 32 / scheme.bucket_size
    return own if scheme.exchange == "alltoall" else nodes * own


@every_scheme
@every_layout
def test_bytes_inside_a_node(scheme: Any, size: int, local_size: int) -> None:
    elements, nodes = 3072 * 48, size // local_size
    result = simulate(
        Hierarchical(scheme), [gaussian(w, elements) for w in range(size)], local_size=local_size
    )
    inside = (local_size - 1) / local_size * elements / 8
    assert result.bytes_sent["local alltoall"] == 32 * inside
    found, bits = result.bytes_sent["local allgather"], returned_bits(scheme, nodes)
    assert bits <= 32
    if getattr(scheme, "coding", "fixed") == "fixed":
        assert found == pytest.approx(bits * inside, rel=2e-3)
    else:
        assert 0.3 * bits * inside < found <= bits * inside + 8 * 3 * nodes * local_size


@pytest.mark.parametrize(
    ("scheme", "most"),
    [
        (QSGD(4, exchange="allgather"), 7),
        (QSGD(4, coding="elias"), 7),
        (QSGD(2, exchange="allgather"), 15),
        (EDEN(4, exchange="allgather"), 7),
    ],
    ids=str,
)
def test_averages_return_where_they_have_no_more_bytes(scheme: Scheme, most: int) -> None:
    elements = 20 * 1024
    for nodes in (most, most + 1):
        workers = Workers(0, 2 * nodes, local_size=2)
        last = Hierarchical(scheme).for_workers(workers).collectives[-1]
        groups = [gaussian(rank, elements) for rank in range(2 * nodes)]
        result = simulate(Hierarchical(scheme), groups, local_size=2)
        expected = simulate(scheme, [own[0] for own in node_means([[g] for g in groups], 2)])
        assert all(same_bits(own[0], expected.decoded[0][0]) for own in result.decoded)
        if nodes > most:
            assert last.dtype == "float32"
            assert result.bytes_sent["local allgather"] == 2 * elements
        else:
            assert last.dtype == ("int32" if getattr(scheme, "coding", "fixed") == "fixed" else "uint8")
            assert result.bytes_sent["local allgather"] < 2 * elements


@pytest.mark.parametrize("local_size", [2, 4])
def test_a_scheme_that_cannot_decode_elsewhere_returns_averages(local_size: int) -> None:
    scheme, groups = Hierarchical(ScaledSign()), groups_of(4)
    assert scheme.for_workers(Workers(0, 4, local_size=local_size)).collectives[-1].dtype == "float32"
    result = simulate(scheme, groups, local_size=local_size)
    flat = node_means(groups, local_size)
    expected = simulate(ScaledSign(), flat).decoded[0] if local_size < 4 else flat[0]
    assert all(all(map(same_bits, own, expected)) for own in result.decoded)


@dataclass(frozen=True)
class Promising(QSGD):
    """Says what it receives, and gives something else."""

    given: int | None = None

    def begin(self, gradients: Sequence[Any], workers: Workers, kernels: Any) -> Exchange:
        found: Decoded = yield from super().begin(gradients, workers, kernels)
        assert found.received is not None
        found.received = None if self.given is None else found.received[: self.given]
        return found


@pytest.mark.parametrize(("given", "returned"), [(None, "none"), (1, "1")])
def test_what_a_scheme_has_received_is_what_it_promises(given: int | None, returned: str) -> None:
    groups = [gaussian(rank, 3000) for rank in range(4)]
    with pytest.raises(
        TypeError, match=f"received_lengths promises 2 arrays, and begin has returned {returned};"
    ):
        simulate(Hierarchical(Promising(given=given)), groups, local_size=2)


@pytest.mark.parametrize(
    ("scheme", "bits"), [(BinSGDM(), 1 + 1 / 1024), (GlobalQSGD(8), 8 + 32 / 1024)], ids=["binsgdm", "global"]
)
@every_layout
def test_bytes_are_those_of_the_cost_table(scheme: Scheme, bits: float, size: int, local_size: int) -> None:
    elements, nodes = 2**10 * 32 * 24, size // local_size
    result = simulate(Hierarchical(scheme), [np.zeros(elements, np.float32)] * size, local_size=local_size)
    sent = result.bytes_sent
    between = sum(count for name, count in sent.items() if name.startswith("cross"))
    assert between * local_size == pytest.approx(2 * (nodes - 1) / nodes * bits * elements / 8, rel=1e-3)
    inside = (local_size - 1) / local_size * elements
    assert sent["local alltoall"] == 4 * inside
    assert sent["local allgather"] == pytest.approx(bits / 8 * inside, rel=1e-3)


# ---- what travels to the owners


def as_codes(groups: list, local_size: int, seed: int, step: int) -> list:
    """What 8 bits make of the workers' gradients."""
    found = []
    for rank, own in enumerate(groups):
        node, place = divmod(rank, local_size)
        found.append([])
        for i, x in enumerate(own):
            key = RngKey(seed, str(i)).correlated(f"inside {node}", step, place, local_size)
            norms = reference.bucket_maxima(x, 256)
            words = reference.encode_uniform_codes(x, norms, 256, 8, key)
            found[-1].append((words, norms))
    return found


@every_scheme
@every_layout
def test_8_bits_are_the_flat_exchange_of_the_codes_means(scheme: Scheme, size: int, local_size: int) -> None:
    groups = groups_of(size)
    result = simulate(Hierarchical(scheme, 8), groups, local_size=local_size, seed=3, step=7)
    codes = as_codes(groups, local_size, 3, 7)
    means = [
        [
            reference.decode_uniform_codes(*zip(*same), 256, 8, 1 / local_size, np.empty(d, np.float32))
            for d, same in zip(MANY_LENGTHS, zip(*codes[first : first + local_size]))
        ]
        for first in range(0, size, local_size)
    ]
    expected = simulate(scheme, means, seed=3, step=7)
    for own in result.decoded:
        assert all(map(same_bits, own, expected.decoded[0]))


@every_scheme
def test_float16_is_the_flat_exchange_of_the_rounded_means(scheme: Scheme) -> None:
    groups = groups_of(4)
    result = simulate(Hierarchical(scheme, "float16"), groups, local_size=2, seed=3)
    rounded = [[x.astype(np.float16).astype(np.float32) for x in own] for own in groups]
    expected = simulate(scheme, node_means(rounded, 2), seed=3)
    for own in result.decoded:
        assert all(map(same_bits, own, expected.decoded[0]))


@pytest.mark.parametrize("inside", ["float16", 8])
@pytest.mark.parametrize("scheme", [QSGD(4), BinSGDM()], ids=["qsgd", "binsgdm"])
def test_both_backends_send_the_same_inside(scheme: Scheme, inside: Any) -> None:
    groups = groups_of(4)
    workers = [Workers(rank, 4, local_size=2) for rank in range(4)]
    nested = Hierarchical(scheme, inside)
    found = []
    for backend in ("numpy", "native"):
        states = [owned_states(nested, groups[worker.rank], worker) for worker in workers]
        states = [[BinaryState(m.copy(), s.copy(), beta) for m, s, beta in own] for own in states]
        found.append(simulator.run(nested, groups, kernels=backend, local_size=2, states=states).decoded[3])
    assert all(map(same_bits, *found))


@pytest.mark.parametrize(("inside", "bits"), [("float32", 32), ("float16", 16), (8, 8 + 32 / 256)])
@pytest.mark.parametrize("local_size", [2, 4])
def test_bytes_on_the_way_in(inside: Any, bits: float, local_size: int) -> None:
    elements = 1024 * 32
    scheme = Hierarchical(GlobalQSGD(8), inside)
    sent = simulate(scheme, [gaussian(w, elements) for w in range(8)], local_size=local_size).bytes_sent
    assert sent["local alltoall"] == (local_size - 1) / local_size * bits / 8 * elements
    first = scheme.collectives[0]
    assert first.dtype == {"float32": "float32", "float16": "float16", 8: "int32"}[inside]


def test_8_bits_are_unbiased() -> None:
    copies, workers = 3000, [gaussian(worker, 256) for worker in range(2)]
    result = simulate(Hierarchical(QSGD(4), 8), [np.tile(g, copies) for g in workers], local_size=2)
    reach = 2 * float(max(np.abs(g).max() for g in workers)) / 127
    expected = np.mean(np.array(workers, np.float64), axis=0)
    assert_unbiased(result.decoded[0][0].reshape(copies, 256), expected, reach, reach * 2.0**-14)


@pytest.mark.parametrize("inside", ["float32", "float16", 8])
def test_the_error_is_as_stated(inside: Any) -> None:
    gradients = [gaussian(worker, 2**18) for worker in range(4)]
    exact = Hierarchical(QSGD(12), inside)
    stated = exact.relative_error(4, 2)
    assert stated is not None
    assert simulate(exact, gradients, local_size=2).nmse ** 0.5 == pytest.approx(stated, rel=0.1)


def test_nodes_draw_different_numbers() -> None:
    x = gaussian(0, 2048)
    both = simulate(Hierarchical(QSGD(16), 8), [x] * 4, local_size=2)
    codes = as_codes([[x]] * 4, 2, 0, 0)
    assert not same_bits(codes[0][0][0], codes[2][0][0])
    assert both.nmse > 0


@pytest.mark.parametrize("value", [np.nan, np.inf, 65520.0, 1e5])
def test_what_float16_does_not_hold_is_nan_in_its_bucket(value: float) -> None:
    groups = [[gaussian(worker, 5000)] for worker in range(4)]
    clean = simulate(Hierarchical(QSGD(4), "float16"), groups, local_size=2).decoded[0][0]
    groups[2][0][1500] = value
    expected = clean.copy()
    expected[1280:1536] = np.nan
    for own in simulate(Hierarchical(QSGD(4), "float16"), groups, local_size=2).decoded:
        assert same_bits(own[0], expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_8_bits_of_what_is_not_finite_are_nan_in_its_bucket(value: float) -> None:
    groups = [[gaussian(worker, 5000)] for worker in range(4)]
    clean = simulate(Hierarchical(QSGD(4, bucket_size=32), 8), groups, local_size=2).decoded[0][0]
    groups[2][0][1500] = value
    expected = clean.copy()
    expected[1280:1536] = np.nan
    for own in simulate(Hierarchical(QSGD(4, bucket_size=32), 8), groups, local_size=2).decoded:
        assert same_bits(own[0], expected)


@pytest.mark.parametrize("inside", ["float16", 8])
def test_workers_that_count_differently_decode_the_same(inside: Any) -> None:
    groups = [[gaussian(10 * worker + i, d) for i, d in enumerate((3000, 0, 33))] for worker in range(4)]
    finished = lockstep(Hierarchical(EDEN(), inside), groups, local_size=2, steps=[5, 2**32 + 3, 0, 5])
    for i, first in enumerate(groups[0]):
        decoded, *others = (found.write(i, 0.25, np.empty(len(first), np.float32)) for found in finished)
        assert all(same_bits(decoded, other) for other in others)


@pytest.mark.parametrize("inside", ["float16", 8])
def test_on_a_single_node_only_the_way_in_is_rounded(inside: Any) -> None:
    groups = groups_of(3)
    result = simulate(Hierarchical(QSGD(2), inside), groups, local_size=3)
    assert set(result.bytes_sent) == {"local alltoall", "local allgather"}
    exact = node_means(groups, 3)[0]
    for own, expected in zip(result.decoded[2], exact):
        assert np.abs(own - expected).max(initial=0) < 0.05
    assert not all(map(same_bits, result.decoded[2], exact))


def test_something_else_inside_is_refused() -> None:
    with pytest.raises(ValueError, match="inside=16: use 'float32', 'float16' or 8"):
        Hierarchical(QSGD(4), 16)  # type: ignore[arg-type]


# ---- special values


@every_scheme
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_element_gives_nan_in_its_bucket_and_nowhere_else(scheme: Scheme, value: float) -> None:
    groups = [[gaussian(worker, 5000)] for worker in range(4)]
    clean = simulate(Hierarchical(scheme), groups, local_size=2).decoded[0][0]
    bucket = getattr(scheme, "bucket_size", 1024)
    for worker, element in ((0, 0), (3, 4999), (1, 1500)):
        damaged = [[own[0].copy()] for own in groups]
        damaged[worker][0][element] = value
        expected = clean.copy()
        expected[element // bucket * bucket : (element // bucket + 1) * bucket] = np.nan
        for own in simulate(Hierarchical(scheme), damaged, local_size=2).decoded:
            assert same_bits(own[0], expected)


@pytest.mark.parametrize("scheme", [QSGD(4), NUQSGD(4), GlobalQSGD(8)], ids=str)
def test_on_a_single_node_a_float64_that_float32_does_not_hold_is_an_infinity(scheme: Scheme) -> None:
    groups = [[gaussian(worker, 2500).astype(np.float64)] for worker in range(2)]
    groups[1][0][1500] = 1e300
    single = Hierarchical(scheme).for_workers(Workers(0, 2, local_size=2))
    decoded = lockstep(single, groups, local_size=2)[0].write(0, 0.5, np.empty(2500))
    assert np.flatnonzero(~np.isfinite(decoded)).tolist() == [1500]
    assert decoded[1500] == np.inf


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.uint16])
@pytest.mark.parametrize(
    "inner",
    [QSGD(4, bucket_size=96), GlobalQSGD(4, levels="exponential"), GlobalQSGD(8, rotate=True), EDEN()],
    ids=str,
)
def test_other_types_are_converted_first_and_last(inner: Scheme, dtype: type) -> None:
    scheme = Hierarchical(inner)
    inputs = [[reference.store_float32(gaussian(w, 2500), np.empty(2500, dtype))] for w in range(4)]
    converted = [[reference.as_float32(g[0])] for g in inputs]
    narrow, wide = (lockstep(scheme, groups, local_size=2)[1] for groups in (inputs, converted))
    out, expected = np.empty(2500, dtype), np.empty(2500, np.float32)
    narrow.write(0, 0.3, out)
    wide.write(0, 0.3, expected)
    assert same_bits(out, reference.store_float32(expected, np.empty(2500, dtype)))


# ---- arguments


def test_nodes_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="5 workers cannot form nodes of 2"):
        simulate(Hierarchical(QSGD(4)), [np.zeros(4, np.float32)] * 5, local_size=2)


def test_overrides_are_for_the_scheme_between_the_nodes() -> None:
    policy = Policy(Hierarchical(QSGD(4), 8), overrides={"head.*": {"bits": 8}})
    assert policy.scheme_for("head.weight", 5000) == Hierarchical(QSGD(8), 8)
    assert policy.scheme_for("body.weight", 5000) == Hierarchical(QSGD(4), 8)
    with pytest.raises(ValueError, match="QSGD has no argument 'beta'"):
        Policy(Hierarchical(QSGD(4)), overrides={"head.*": {"beta": 0.9}})


def test_it_is_the_nodes_that_a_width_must_fit() -> None:
    policy = Policy(Hierarchical(GlobalQSGD(4)))
    policy.check_workers(16, local_size=4)
    with pytest.raises(ValueError, match="16 workers need bits >= 6"):
        policy.check_workers(64, local_size=4)
    with pytest.raises(ValueError, match="5 workers cannot form nodes of 2"):
        policy.check_workers(5, local_size=2)


def test_collectives_are_declared_in_order() -> None:
    for scheme in SCHEMES.values():
        first, *between, last = Hierarchical(scheme).collectives
        assert (first.group, last.group) == (LOCAL, LOCAL)
        assert [c._replace(group="all") for c in between] == list(scheme.collectives)
        assert {c.group for c in between} == {CROSS}
