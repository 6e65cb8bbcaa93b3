"""Trains with a scheme from outside of the package; each gradient has the simulator's bits. Run by test_own_scheme.py.

    horovodrun -np 4 python own_scheme_worker.py torch|tensorflow
    mpirun -np 3 python own_scheme_worker.py mpi

Prints FINISHED on each worker when all is well.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import numpy as np


def with_torch() -> None:
    import horovod.torch as hvd
    import torch
    import torch_scenarios as scenarios
    from torch_harness import base_optimizer, message_of, net, net_loss, train_and_compare

    import horovod_quant.torch as hvq
    from horovod_quant import schemes

    size = int(os.environ.get("HOROVOD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
    hierarchical = 2 if size == 4 else True
    hvd.init(process_sets=hvq.hierarchical_process_sets(None if hierarchical is True else hierarchical))
    torch.set_num_threads(1)
    from own_terngrad import OnTheHost, TernGrad

    def make(**arguments: Any) -> Any:
        return hvq.Compressor(TernGrad(), **arguments)

    if size == 4:  # what two workers cannot show
        train_and_compare(make(), steps=1)
        train_and_compare(make(hierarchical=hierarchical, overrides={"2.*": {"bucket_size": 64}}), steps=2)
        scenarios.nan_on_one_rank(lambda **arguments: make(hierarchical=hierarchical, **arguments))
        hvd.barrier()
        return
    assert hvq.TernGrad(bucket_size=64).policy.scheme == TernGrad(64)
    assert "TernGrad" in dir(hvq)
    for compressor in (
        hvq.TernGrad(seed=3),
        hvq.Compressor("terngrad"),
        make(overrides={"2.*": {"bucket_size": 64}}, exclude="4.weight"),
        make(hierarchical=hierarchical),
        hvq.Compressor(OnTheHost()),
    ):
        train_and_compare(compressor, steps=2)
    scenarios.nan_on_one_rank(hvq.TernGrad)
    scenarios.resuming_gives_the_same_bits(hvq.TernGrad)

    def first_step(compressor: Any) -> Any:
        model = net()
        optimizer = hvd.DistributedOptimizer(
            base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
        )
        net_loss(model, 0).backward()
        return optimizer.step

    for mine, other, named in (
        (hvq.TernGrad(), hvq.QSGD(), "(wire format "),
        (hvq.TernGrad(), hvq.TernGrad(bucket_size=64), "has bucket_size="),
    ):
        step = first_step(mine if hvd.rank() else other)
        message = message_of(step, RuntimeError)
        assert named in message, message
        for (
            handle,
            _,
        ) in step.__self__._handles.values():  # the other rank may not have launched all of them yet
            hvd.synchronize(handle)

    tensor = torch.ones(2000)
    for wrong, told in (
        (hvq.QSGD, "that is a class; use an instance, QSGD()"),
        (schemes.QSGD(), "that is a scheme, not a compressor; use hvq.Compressor(QSGD("),
    ):
        assert told in message_of(lambda: hvd.allreduce(tensor, compression=wrong), TypeError)  # noqa: B023
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first_step(hvq.TernGrad(min_elements=10_000))()
    assert sum("compresses nothing" in str(each.message) for each in caught) == 1
    train_and_compare(hvq.TernGrad(), steps=1)
    hvd.barrier()


def with_tensorflow() -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf
    import tf_calls
    import tf_scenarios as scenarios
    from tf_harness import gather_objects, message_of, rank_data, recording

    import horovod_quant.tensorflow as hvq

    hvd.init(process_sets=hvq.hierarchical_process_sets())
    tf.config.threading.set_intra_op_parallelism_threads(1)
    own = recording(hvq.TernGrad)
    from own_terngrad import CallsNumpy, OnTheHost, TernGrad

    def make(**arguments: Any) -> Any:
        return own(**arguments)

    def in_operations(**arguments: Any) -> Any:
        return own(**{"kernels": "tensorflow", **arguments})

    def hierarchical(**arguments: Any) -> Any:
        return own(hierarchical=True, **arguments)

    for each in (make, in_operations, hierarchical):
        scenarios.tape_in_a_function(each)
    scenarios.overrides_and_excluded(make)
    tf_calls.resuming_gives_the_same_bits(in_operations)
    scenarios.nan_on_one_rank(make)

    def reduced(compressor: Any) -> np.ndarray:
        call = tf.function(lambda x: hvd.allreduce(x, name="values", compression=compressor))
        return call(tf.constant(rank_data(3000))).numpy()

    usual = reduced(hvq.Compressor(TernGrad()))
    assert np.array_equal(reduced(hvq.Compressor(CallsNumpy())), usual)
    message = message_of(lambda: reduced(hvq.Compressor(CallsNumpy(), kernels="tensorflow")), TypeError)
    assert (
        "CallsNumpy(bucket_size=1024) cannot be run on TensorFlow's tensors. If it computes with numpy"
        in message
    )
    assert "host_only = True" in message
    message = message_of(lambda: hvq.Compressor(OnTheHost(), kernels="tensorflow"), ValueError)
    assert message.startswith(
        "host_only=True: OnTheHost then needs its arrays in host memory, where kernels='tensorflow' cannot run"
    )
    os.environ["HOROVOD_QUANT_KERNELS"] = "tensorflow"  # as "auto" does where there is a GPU
    assert np.array_equal(reduced(hvq.Compressor(OnTheHost())), usual)
    del os.environ["HOROVOD_QUANT_KERNELS"]

    compressor = hvq.TernGrad() if hvd.rank() else hvq.QSGD()
    message = message_of(lambda: reduced(compressor), tf.errors.InvalidArgumentError)
    gather_objects(None)
    assert "same arguments" in message, message
    assert "compression" in message, message
    gather_objects(None)


def with_mpi() -> None:
    from helpers import gaussian, same_bits
    from mpi4py import MPI
    from own_terngrad import OnTheHost, TernGrad

    from horovod_quant import mpi, simulator
    from horovod_quant.schemes import Hierarchical
    from horovod_quant.schemes.hierarchical import inner_of

    size = MPI.COMM_WORLD.Get_size()
    groups = [
        [gaussian(10 * rank + i, length) for i, length in enumerate((5000, 33, 0))] for rank in range(size)
    ]
    groups[0][0][7] = np.nan
    for scheme in (TernGrad(), OnTheHost(64), Hierarchical(TernGrad())):
        expected = simulator.run(scheme, groups, seed=4, kernels="numpy")
        found = mpi.run(scheme, groups[MPI.COMM_WORLD.Get_rank()], seed=4, local_size=1)
        assert all(map(same_bits, found.decoded, expected.decoded[0]))
        assert np.isnan(found.decoded[0]).sum() == inner_of(scheme).bucket_size


if __name__ == "__main__":
    {"torch": with_torch, "tensorflow": with_tensorflow, "mpi": with_mpi}[sys.argv[1]]()
    print("FINISHED", flush=True)
