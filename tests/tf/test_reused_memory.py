"""State that TensorFlow no longer refers to gives its memory to the next step's, and no other does."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from horovod_quant.tensorflow.reused_memory import ReusedMemory  # noqa: E402

ELEMENTS = 5000


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_only_unused_memory_is_given_again() -> None:
    memory = ReusedMemory()
    first, second = memory.take("momentum", ELEMENTS), memory.take("momentum", ELEMENTS)
    assert first.shape == (ELEMENTS,)
    assert first.dtype == np.float32
    assert address(first) % 64 == 0
    assert not np.shares_memory(first, second)
    part, freed = first[10:].reshape(10, -1), address(second)
    del first, second
    third = memory.take("momentum", ELEMENTS)
    assert address(third) == freed
    assert not np.shares_memory(third, part)


def test_places_and_lengths_share_nothing() -> None:
    memory = ReusedMemory()
    addresses = {address(memory.take(place, ELEMENTS)) for place in ("momentum", "scale")}
    assert len(addresses) == 2
    assert len(memory.take("momentum", 2 * ELEMENTS)) == 2 * ELEMENTS
    assert len(memory.take("momentum", 7)) == 7


def test_arrays_that_are_held_for_ever_do_not_add_up() -> None:
    memory = ReusedMemory()
    held = [memory.take("momentum", ELEMENTS) for _ in range(20)]
    assert len({address(array) for array in held}) == len(held)
    del held
    again = [memory.take("momentum", ELEMENTS) for _ in range(20)]
    assert len({address(array) for array in again}) == len(again)


@pytest.mark.parametrize("traced", [True, False])
def test_a_variable_keeps_what_it_was_assigned(traced: bool) -> None:
    memory, addresses = ReusedMemory(), []
    variable = tf.Variable(tf.zeros(ELEMENTS))

    def next_value(before: np.ndarray) -> np.ndarray:
        array = memory.take("momentum", ELEMENTS)
        addresses.append(address(array))
        np.add(before, 1, out=array)
        return array

    def step() -> None:
        variable.assign(tf.ensure_shape(tf.numpy_function(next_value, [variable], tf.float32), [ELEMENTS]))

    step = tf.function(step) if traced else step
    snapshots = []
    for number in range(12):
        step()
        assert np.all(variable.numpy() == number + 1)
        if number in (2, 7):
            snapshots.append((number + 1, variable.numpy(), variable.read_value()))
    for value, array, tensor in snapshots:
        assert np.all(array == value)
        assert np.all(tensor.numpy() == value)
    assert len(set(addresses)) < len(addresses)
