"""Records what compressors take and give inside Horovod's graphs, and compares it with the simulator, bit for bit."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import horovod.tensorflow as hvd
import numpy as np
import scenario_table
import tensorflow as tf
from oracle import Oracle
from scenario_table import OWN, makers

import horovod_quant.tensorflow as hvq

Make = Callable[..., hvq.Compressor]

KERAS_3 = getattr(tf.keras, "__version__", "2").startswith("3")


def recording(kind: type) -> Any:
    """A subclass that keeps each gradient with its result, as they are when the graph runs."""

    class Recording(kind):  # type: ignore[misc]
        def _bind(self) -> None:
            super()._bind()
            self.records: list[tuple[str, np.ndarray, np.ndarray]] = []

            self._last_name: str | None = None

        def _name(self, call: Any) -> str:
            self._last_name = super()._name(call)
            return self._last_name

        def compress_for(self, call: Any, tensor: Any) -> Any:
            control_tensor, ctx = super().compress_for(call, tensor)
            return control_tensor, (call.key or self._last_name, tensor, ctx)

        def decompress(self, output: Any, ctx: Any) -> Any:
            if ctx is None:
                return super().decompress(output, ctx)
            name, tensor, inner = ctx
            result = super().decompress(output, inner)

            def record(raw: np.ndarray, reduced: np.ndarray) -> np.ndarray:
                self.records.append((name, np.array(raw), np.array(reduced)))
                return reduced

            recorded = tf.numpy_function(record, [tensor, result], result.dtype, stateful=False)
            recorded.set_shape(result.shape)
            return recorded

    Recording.__name__ = kind.__name__
    Recording.__qualname__ = f"Recording{kind.__name__}"
    Recording.__module__ = __name__
    globals()[Recording.__qualname__] = Recording  # where pickle looks for it
    return Recording


RECORDING = {kind.__name__: recording(getattr(hvq, kind.__name__)) for kind in OWN.values()}
QSGD, NUQSGD, GlobalQSGD, EDEN, BinSGDM = (
    RECORDING[name] for name in ("QSGD", "NUQSGD", "GlobalQSGD", "EDEN", "BinSGDM")
)

METHODS: dict[str, Make] = makers(RECORDING)

VARIANTS: dict[str, Make] = {
    "qsgdinf": lambda **common: QSGD(bits=3, norm="max", bucket_size=96, **common),
    "qsgd-elias": lambda **common: QSGD(bits=4, norm="l2", coding="elias", **common),
    "nuqsgd-alltoall": lambda **common: NUQSGD(bits=4, exchange="alltoall", **common),
    "nuqsgd-omega": lambda **common: NUQSGD(bits=8, coding="elias-omega", rounding="independent", **common),
    "global-qsgd-l2": lambda **common: GlobalQSGD(bits=8, norm="l2", **common),
    "global-qsgd-16": lambda **common: GlobalQSGD(bits=16, rounding="independent", **common),
    "global-qsgd-exponential": lambda **common: GlobalQSGD(bits=4, levels="exponential", **common),
    "global-qsgd-rotated": lambda **common: GlobalQSGD(bits=8, rotate=True, **common),
    "eden-alltoall": lambda **common: EDEN(bits=2, server_bits=4, exchange="alltoall", **common),
    "eden-trellis": lambda **common: EDEN(bits=2, trellis=True, **common),
    "binsgdm-average": lambda **common: BinSGDM(server_bits=3, **common),
}

IN_TENSORFLOW: dict[str, Make] = {
    f"{method}-in-tensorflow": lambda make=make, **common: make(kernels="tensorflow", **common)
    for method, make in {**METHODS, **VARIANTS}.items()
    if f"{method}-in-tensorflow" in scenario_table.IN_TENSORFLOW
}


class TwoLayers(tf.Module):
    """`keras_model` under Keras 3, whose variables have no ``ref()``, which Horovod's tapes need."""

    def __init__(self, dtype: Any, prefix: str = "") -> None:
        super().__init__()
        draw = np.random.default_rng(1).standard_normal
        shapes = {"first/kernel": (40, 70), "first/bias": (70,), "second/kernel": (70, 30)}
        self._values = [
            tf.Variable(tf.cast(draw(shape) / 8, dtype), name=prefix + name) for name, shape in shapes.items()
        ]

    def __call__(self, x: Any) -> tf.Tensor:
        first, bias, second = self._values
        return tf.tanh(tf.cast(x, first.dtype) @ first + bias) @ second

    @property
    def compute_dtype(self) -> str:
        return self._values[0].dtype.name

    @property
    def layers(self) -> list[Any]:
        return [self]

    def get_weights(self) -> list[np.ndarray]:
        return [each.numpy() for each in self._values]

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        for each, value in zip(self._values, weights):
            each.assign(value)


def keras_model(dtype: str = "float32") -> Any:
    """The same weights on every worker; kernels that are quantized, and a bias that is not."""
    if KERAS_3:
        return TwoLayers(dtype)
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(1)
    dense = tf.keras.layers.Dense
    return tf.keras.Sequential(
        [
            tf.keras.Input((40,)),
            dense(70, activation="tanh", dtype=dtype, name="first"),
            dense(30, use_bias=False, dtype=dtype, name="second"),
        ]
    )


def rank_data(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([hvd.rank(), seed]).standard_normal(shape).astype(dtype)


def optimizer_for(compressor: Any, legacy: bool = False, **options: Any) -> Any:
    if isinstance(compressor, hvq.BinSGDM):
        return (hvq.optim.LegacyBinSGDM if legacy else hvq.optim.BinSGDM)(1e-3, **options)
    return (tf.keras.optimizers.legacy if legacy else tf.keras.optimizers).SGD(0.1)


def gather_objects(value: Any, process_set: Any = None) -> list[Any]:
    """Every rank's value, in rank order. (``hvd.allgather_object`` fails inside of graphs' contexts.)"""
    with tf.init_scope():
        payload = np.frombuffer(pickle.dumps(value), np.uint8)
        process_set = hvd.global_process_set if process_set is None else process_set
        gathered = hvd.allgather(tf.constant(payload), name="payloads", process_set=process_set)
    joined = io.BytesIO(gathered.numpy().tobytes())
    return [pickle.load(joined) for _ in range(process_set.size())]


def assert_same_on_all_ranks(arrays: Sequence[Any], what: str, process_set: Any = None) -> None:
    mine = [np.asarray(array).tobytes() for array in arrays]
    everyone = gather_objects(mine, process_set)
    assert all(other == everyone[0] for other in everyone), f"{what} differ between ranks"


def assert_bits_equal(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    assert same.all(), f"{what}: {np.sum(~same)} of {same.size} elements differ"


def check_records(
    compressor: Any,
    exchanges: int,
    factor: float | None = None,
    process_set: Any = None,
    step: Callable[[int], int] = int,
    oracle: Oracle | None = None,
) -> set[str]:
    """Compares everything recorded with the simulator.

    Args:
        compressor: a recording one.
        exchanges: how often each gradient was reduced.
        factor: what the sum over workers is multiplied by; 1 / n by default.
        step: the number that keys are drawn with, of exchange 0, 1, ...
        oracle: one that has followed the compressor before.

    Returns:
        The names of what was quantized.
    """
    size = hvd.size() if process_set is None else process_set.size()
    factor = 1.0 / size if factor is None else factor
    oracle = Oracle(compressor, step=step) if oracle is None else oracle
    records, compressor.records = compressor.records, []
    by_name: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name, raw, reduced in records:
        by_name.setdefault(name, []).append((raw, reduced))
    workers = gather_objects(by_name, process_set)
    quantized = set()
    for name, own in sorted(by_name.items()):
        assert len(own) == exchanges, f"{name} was exchanged {len(own)} times, not {exchanges}"
        for exchange, (raw, reduced) in enumerate(own):
            what = f"{name}, exchange {exchange}"
            everyone = [worker[name][exchange] for worker in workers]
            raws = [{name: each.astype(np.float64)} for each, _ in everyone]
            expected = oracle.expected(raws, name, factor)
            if expected is None:
                exact = factor * sum(each[name] for each in raws)
                np.testing.assert_allclose(reduced.astype(np.float64), exact, rtol=1e-2, atol=1e-5)
            else:
                quantized.add(name)
                with np.errstate(over="ignore", invalid="ignore"):
                    expected = expected.reshape(raw.shape).astype(raw.dtype)
                assert_bits_equal(reduced, expected, what)
            first = everyone[0][1].tobytes()
            assert all(each.tobytes() == first for _, each in everyone), f"{what} differs between ranks"
    return quantized


def message_of(action: Callable[[], Any], kind: type = Exception) -> str:
    """The message of the error that ``action`` must raise."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def batches(count: int, **data: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for seed in range(count):
        yield rank_data(8, 40, seed=seed, **data), rank_data(8, 30, seed=100 + seed, **data)
