"""Reductions that a script calls itself, without an optimizer: scenarios of tf_scenarios.py."""

from __future__ import annotations

import functools
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from oracle import Oracle, unlike_neighbours
from tf_harness import (
    Make,
    assert_bits_equal,
    assert_same_on_all_ranks,
    gather_objects,
    message_of,
    rank_data,
)
from turns import taken

import horovod_quant.tensorflow as hvq
from horovod_quant.frontends.stats import OTHER_NAMES
from horovod_quant.tensorflow import recent


def direct_calls(make: Make) -> None:
    compressor = make()
    if isinstance(compressor, hvq.BinSGDM):
        message = message_of(lambda: hvd.allreduce(tf.ones(2000), compression=compressor), ValueError)
        assert "needs the optimizer" in message
        return
    oracle = Oracle(compressor)

    def call(a: Any, b: Any, c: Any) -> Any:
        single = hvd.allreduce(a, name="direct", compression=compressor)
        return [single, *hvd.grouped_allreduce([b, c], name="s", op=hvd.Sum, compression=compressor)]

    for function in (call, tf.function(call)):
        given = [rank_data(40, 50, seed=i) for i in range(3)]
        results = function(*given)
        everyone = gather_objects(dict(zip(("direct", "s.0", "s.1"), given)))
        for name, factor, result in zip(("direct", "s.0", "s.1"), (1 / hvd.size(), 1.0, 1.0), results):
            expected = oracle.expected(everyone, name, factor)
            assert_bits_equal(result.numpy().reshape(-1), expected, name)
    same = tf.constant(given[0])
    twice = functools.partial(hvd.grouped_allreduce, [same, same], name="twice", compression=compressor)
    everyone = gather_objects({"twice.0": given[0], "twice.1": given[0]})
    for function in (twice, tf.function(twice)):
        for name, result in zip(("twice.0", "twice.1"), function()):
            expected = oracle.expected(everyone, name, 1 / hvd.size())
            assert_bits_equal(result.numpy().reshape(-1), expected, name)
    listed = hvd.grouped_allreduce([given[1].tolist()], name="listed", op=hvd.Sum, compression=compressor)
    expected = oracle.expected(gather_objects({"listed.0": given[1]}), "listed.0", 1.0)
    assert_bits_equal(listed[0].numpy().reshape(-1), expected, "a list of numbers")
    unnamed = hvd.allreduce(tf.constant(given[0]), compression=compressor)
    assert_same_on_all_ranks([unnamed], "an unnamed allreduce")
    small = hvd.allreduce(tf.fill([3], tf.constant(2.0, tf.bfloat16)), compression=compressor)
    assert small.dtype is tf.bfloat16
    assert small.numpy().tolist() == [2.0] * 3


def scale_factors(make: Make) -> None:
    """Horovod's own reach the result exactly, those beyond the tensors' type too, of what is small as well."""
    compressor = make()
    if isinstance(compressor, hvq.BinSGDM):
        return
    factors = ((1e-6, 1.0, 2000.0), (2e-7, 1.0, 20000.0), (2.0**17, 1.0, 1e-3), (1.0, 2.0**17, 1e-3))
    for dtype in (tf.float16, *taken(tf.float32, tf.bfloat16, tf.float64)):
        for number, (before, after, magnitude) in enumerate(factors):
            scaled: dict[str, Any] = {"op": hvd.Sum, "prescale_factor": before, "postscale_factor": after}
            wide = tf.float64 if dtype is tf.float64 else tf.float32
            total = float(hvd.allreduce(tf.ones(1, wide), name="one", **scaled)[0])
            np.testing.assert_allclose(total, hvd.size() * before * after, rtol=1e-6)
            given = tf.cast(magnitude * (1 + abs(tf.constant(rank_data(2000, seed=number)))), dtype)
            small = given[:10]
            group, alone = f"group_{dtype.name}_{number}", f"alone_{dtype.name}_{number}"
            scaled["compression"] = compressor
            together = functools.partial(hvd.grouped_allreduce, name=group, **scaled)
            one_by_one = functools.partial(hvd.allreduce, name=alone, **scaled)
            for reduce, name in (
                (lambda: together([given, small]), f"{group}.0"),  # noqa: B023
                (lambda: [one_by_one(given)], alone),  # noqa: B023
            ):
                oracle = Oracle(compressor)
                everyone = gather_objects({name: tf.cast(given, tf.float64).numpy()})
                exact = sum(each[name][:10] for each in everyone) * before * after
                for function in (reduce, tf.function(reduce)):
                    result, *rest = function()
                    expected = oracle.expected(everyone, name, total / hvd.size())
                    expected = expected.astype(dtype.as_numpy_dtype)
                    assert_bits_equal(result.numpy().reshape(-1), expected, f"{dtype}, {name}")
                    for own in rest:
                        assert own.dtype is dtype
                        np.testing.assert_allclose(tf.cast(own, tf.float64), exact, rtol=1e-2)


def integers_pass_through(make: Make) -> None:
    """What comes out is what Horovod's own compressor gives, errors included: it reduces no booleans, for example."""
    compressor = make()
    for dtype in taken(tf.int32, tf.int64, tf.bool, tf.uint8):
        for op in (hvd.Average, hvd.Sum, hvd.Max):
            ours, horovods = (
                _reduced_integers(dtype, op, each) for each in (compressor, hvd.Compression.fp16)
            )
            assert len(ours) == len(horovods)
            for one, other in zip(ours, horovods):
                assert type(one) is type(other)
                if not isinstance(other, type):
                    assert_bits_equal(one, other, f"{dtype}, op={op}")
    assert not compressor.stats().parameters


def _reduced_integers(dtype: Any, op: Any, compression: Any) -> list[Any]:
    """By one operation and by a group, of sizes around those that would be compressed, without and with a graph; or the
    error's kind.
    """

    def reduce(*given: Any) -> list[Any]:
        grouped = hvd.grouped_allreduce(given, name="integers", op=op, compression=compression)
        return [*grouped, hvd.allreduce(given[-1], op=op, compression=compression)]

    numbers = [9 * rank_data(length, seed=length) for length in (3, 17, 2000)]
    # What becomes of negative numbers as uint8 is not defined, and differs from time to time.
    given = [tf.cast(abs(own) if dtype is tf.uint8 else own, dtype) for own in numbers]
    results: list[Any] = []
    for function in (reduce, tf.function(reduce)):
        try:
            results += [each.numpy() for each in function(*given)]
        except (TypeError, tf.errors.InvalidArgumentError) as error:
            results.append(type(error))
    return results


def integers_on_some_workers(make: Make) -> None:
    """Horovod's own error on every worker, at once; what comes after is right."""
    compressor = make()
    if isinstance(compressor, hvq.BinSGDM):  # which needs its optimizer
        return
    for length in taken(2000, 17, 3):
        own = tf.ones(length, (tf.float32, tf.int32)[hvd.rank() % 2])
        reduce = functools.partial(hvd.allreduce, name="mixed", compression=compressor)
        for function in (reduce, tf.function(reduce)):
            message = message_of(lambda: function(own), tf.errors.OpError)  # noqa: B023
            assert "Mismatched data types" in message, message
            gather_objects(None)
    result = hvd.allreduce(tf.ones(2000), name="alike", compression=compressor)
    assert_same_on_all_ranks([result], "after the error")
    assert 0.5 < result.numpy().mean() < 1.5


def sums_that_leave_their_fields(make: Make) -> None:
    """They are found, exchanged again by all workers, and counted."""
    compressor = make()
    oracle = Oracle(compressor)
    reduce = functools.partial(hvd.allreduce, name="w", compression=compressor)
    for step, function in enumerate((reduce, tf.function(reduce))):
        own = unlike_neighbours(hvd.rank(), step)
        result = function(tf.constant(own))
        expected = oracle.expected(gather_objects({"w": own}), "w", 1 / hvd.size())
        assert_bits_equal(result.numpy(), expected, f"step {step}")
    again = compressor.stats().parameters["w"].exchanged_again
    assert again > 0
    assert gather_objects(again) == [again] * hvd.size()


def shapes_that_differ(make: Make) -> None:
    """An error on every worker at once, as Horovod's own, whatever the worker's own shape is, small ones included."""
    compressor = make()
    if isinstance(compressor, hvq.BinSGDM):
        return
    for lengths in taken((2000, 2001), (2000, 9000), (500, 3000), (3000, 500)):
        own = tf.ones(lengths[min(hvd.rank(), 1)])
        for name in (None, "differs"):
            reduce = functools.partial(hvd.allreduce, name=name, compression=compressor)
            for function in (reduce, tf.function(reduce)):
                message_of(lambda: function(own))  # noqa: B023
                gather_objects(None)
    assert hvd.allreduce(tf.ones(2000), compression=compressor).shape == (2000,)


def fresh_names(make: Make) -> None:
    """A name for each call: those of long ago are forgotten, and counted together; graphs keep theirs.

    A name that comes again repeats no random bits, also after resuming: it counts from where those that have been
    forgotten ended.
    """
    compressor = make()
    if isinstance(compressor, hvq.BinSGDM):
        return
    usual, recent.REMEMBERED_NAMES = recent.REMEMBERED_NAMES, 4
    try:
        reduce = functools.partial(hvd.allreduce, compression=compressor)
        given, small = rank_data(1100), tf.ones(5)
        oracle = Oracle(compressor)
        tf.function(reduce)(given, name="kept")
        oracle.expected(gather_objects({"kept": given}), "kept", 1.0)
        for place, number in enumerate(
            [*range(6), *range(6)]
        ):  # every name has been forgotten when it comes again
            name, start = f"name {number}", place // 2  # two names and two small ones are remembered
            oracle_of_name = Oracle(compressor, step=lambda exchange: exchange + start)  # noqa: B023
            wanted = oracle_of_name.expected(gather_objects({name: given}), name, 1 / hvd.size())
            assert_bits_equal(reduce(given, name=name).numpy(), wanted, name)
            reduce(small, name=f"small {number}")
        wanted = oracle.expected(gather_objects({"kept": given}), "kept", 1 / hvd.size())
        assert_bits_equal(reduce(given, name="kept").numpy(), wanted, "kept")
        resumed = make()
        resumed.load_state_dict(compressor.state_dict())
        everyone = gather_objects({"name 0": given})
        wanted = Oracle(compressor, step=lambda _: 5).expected(everyone, "name 0", 1 / hvd.size())
        result = hvd.allreduce(given, name="name 0", compression=resumed)
        assert_bits_equal(result.numpy(), wanted, "after resuming")
    finally:
        recent.REMEMBERED_NAMES = usual
    stats = compressor.stats()
    assert len(stats.parameters) == 1 + 1 + 4
    assert OTHER_NAMES in stats.parameters
    for remembered in (compressor._chains, compressor._ledgers, compressor._steps):
        assert len(remembered) <= 1 + 4
    whole = 2 * (hvd.size() - 1) / hvd.size() * 4
    np.testing.assert_allclose(stats.total.float32_bytes, whole * (14 * 1100 + 12 * 5), atol=1)  # whole bytes


def dynamic_shapes(make: Make) -> None:
    """One trace serves gradients of any length, empty ones included, or of any rank."""
    if isinstance(make(), hvq.BinSGDM):
        return
    _one_trace(make(), [None, None], [(30, 50), (1, 3), (77, 41), (0, 5)])
    _one_trace(make(), None, [(30, 50), (3000,), (), (0, 5)])


def _one_trace(compressor: Any, known: Any, shapes: list[tuple[int, ...]]) -> None:
    oracle, traces = Oracle(compressor), []

    @tf.function(input_signature=[tf.TensorSpec(known)])
    def call(x: Any) -> Any:
        traces.append(x)
        return hvd.allreduce(x, name="dynamic", compression=compressor)

    for shape in shapes:
        given = np.asarray(rank_data(*shape))
        result = call(given).numpy()
        assert result.shape == shape
        if not given.size:
            continue
        scheme = compressor.policy.scheme
        compressor.policy.min_elements = 1  # the oracle's: what has no shape yet is quantized
        compressor.policy._chosen.clear()
        expected = oracle.expected(gather_objects({"dynamic": given}), "dynamic", 1 / hvd.size())
        assert scheme is not None
        assert_bits_equal(result.reshape(-1), expected, f"shape {shape}")
    assert len(traces) == 1


def resuming_gives_the_same_bits(make: Make) -> None:
    """A compressor with another's state goes on with the bits that the other would have drawn."""
    if isinstance(make(), hvq.BinSGDM):  # whose optimizer counts
        return
    compressor = make()
    oracle = Oracle(compressor)
    for exchange in range(4):
        if exchange == 2:
            state, used = compressor.state_dict(), compressor
            assert state == {"exchanges": {"resumed": 2}}
            compressor = make()
            compressor.load_state_dict(state)
            assert compressor.state_dict() == state
            assert "already" in message_of(lambda: used.load_state_dict(state), RuntimeError)  # noqa: B023
        reduce = tf.function(functools.partial(hvd.allreduce, name="resumed", compression=compressor))
        given = rank_data(5000, seed=exchange)
        expected = oracle.expected(gather_objects({"resumed": given}), "resumed", 1 / hvd.size())
        assert_bits_equal(reduce(tf.constant(given)).numpy(), expected, f"exchange {exchange}")


def subnormal_numbers(make: Make) -> None:
    """TensorFlow's threads flush them to zero; the results are defined without that."""
    compressor = make()
    if isinstance(compressor, hvq.BinSGDM):
        return
    given = rank_data(64, 64) * np.float32(1e-38)
    call = tf.function(lambda x: hvd.allreduce(x, name="tiny", op=hvd.Sum, compression=compressor))
    expected = Oracle(compressor).expected(gather_objects({"tiny": given}), "tiny", 1.0)
    assert_bits_equal(call(given).numpy().reshape(-1), expected, "tiny numbers")
    given = rank_data(64, 64) * np.float32(1e-28)
    given[::2] *= np.float32(1e-12)
    call = tf.function(
        lambda x: hvd.allreduce(x, name="wide", postscale_factor=1e-9, op=hvd.Sum, compression=compressor)
    )
    factor = float(hvd.allreduce(tf.ones(1), op=hvd.Sum, postscale_factor=1e-9, name="one")[0]) / hvd.size()
    expected = Oracle(compressor).expected(gather_objects({"wide": given}), "wide", factor)
    if np.count_nonzero(expected):
        assert_bits_equal(call(given).numpy().reshape(-1), expected, "a wide range of numbers")


def differentiation_is_refused(make: Make) -> None:
    kind = type(make()).__mro__[1]  # one that does not record, which ends differentiation as well
    if kind is hvq.BinSGDM:
        return
    compressor = kind()

    def outer() -> Any:
        x = tf.Variable(tf.ones(2000))
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(hvd.allreduce(x * 2.0, name="inner", compression=compressor))
        return tape.gradient(total, x)

    assert "leave compression out" in message_of(outer)
    assert "leave compression out" in message_of(tf.function(outer))
