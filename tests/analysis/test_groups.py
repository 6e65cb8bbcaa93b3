"""Groups and names of an exchange are those of the frontends."""

from __future__ import annotations

import inspect
import math

import pytest

from horovod_quant.analysis import groups
from horovod_quant.analysis.models import MODELS, elements
from horovod_quant.frontends.frontend import BaseCompressor
from horovod_quant.schemes import QSGD, GlobalQSGD


def test_defaults_are_the_compressors_own() -> None:
    parameters = inspect.signature(BaseCompressor).parameters
    assert groups.GROUP_BYTES == parameters["group_bytes"].default
    assert groups.MIN_ELEMENTS == parameters["min_elements"].default


@pytest.mark.parametrize("group_bytes", [1, 2**20, groups.GROUP_BYTES])
@pytest.mark.parametrize("model", MODELS)
def test_groups_are_those_of_the_torch_frontend(model: str, group_bytes: int) -> None:
    pytest.importorskip("torch")  # alone: a module of this package that cannot be imported is a failure
    from horovod_quant.torch import exchange, plan

    shapes = MODELS[model]
    scheme = GlobalQSGD(8)

    compressed = set(groups.compressed_names(scheme, shapes))
    placed = [
        exchange.Member(name, scheme, 4 * math.prod(shapes[name]))
        for name in reversed(shapes)
        if name in compressed
    ]
    assert groups.torch_groups(scheme, shapes, group_bytes) == plan.cut(placed, group_bytes, len(shapes))


def test_names_by_hand() -> None:
    shapes = MODELS["resnet50"]
    large = [name for name, shape in shapes.items() if math.prod(shape) >= 1024]
    assert groups.torch_cache_names(None, shapes) == groups.tensorflow_cache_names(None, shapes) == 161
    # Groups of 32 MiB: four of 102 MB; two allreduces each; the order, the announcement, the roll call.
    assert groups.torch_cache_names(GlobalQSGD(8), shapes) == 161 + 2 * 4 + 3
    assert groups.tensorflow_cache_names(GlobalQSGD(8), shapes) == 161 + 2 * len(large)
    assert groups.tensorflow_cache_names(QSGD(4, exchange="allgather"), shapes) == 161 + len(large) + 1
    assert groups.torch_cache_names(GlobalQSGD(8), {"bias": (10,)}) == 1
    assert elements(shapes) > 0
