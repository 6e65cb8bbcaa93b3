"""Groups and names of an exchange are those of the frontends."""

from __future__ import annotations

import inspect
import math

import pytest

from horovod_quant.analysis import groups
from horovod_quant.analysis.models import MODELS, elements
from horovod_quant.frontends.frontend import BaseCompressor
from horovod_quant.schemes import EDEN, QSGD, GlobalQSGD, Hierarchical


def test_defaults_are_the_compressors_own() -> None:
    parameters = inspect.signature(BaseCompressor).parameters
    assert groups.GROUP_BYTES == parameters["group_bytes"].default
    assert groups.MIN_ELEMENTS == parameters["min_elements"].default


def test_groups_are_cut_as_the_torch_frontend_cuts_them() -> None:
    """Hierarchical EDEN has four collectives a group: fewer groups fit Horovod's cache than of three each."""
    pytest.importorskip("torch")
    from horovod_quant.torch import buckets

    assert groups.cut is buckets.cut
    shapes = {f"p{i}": (2**24,) for i in range(600)}  # each more than a group of 32 MiB
    four = len(groups.torch_groups(Hierarchical(EDEN(3)), shapes))
    assert len(Hierarchical(EDEN(3)).collectives) == 4
    assert four == (1000 - 600) // 4
    assert groups.torch_cache_names(Hierarchical(EDEN(3)), shapes) == 600 + 4 * four + 1


@pytest.mark.parametrize("model", sorted(MODELS))
def test_buckets_are_those_of_ddp(model: str) -> None:
    torch = pytest.importorskip("torch")
    shapes = {name: shape for name, shape in MODELS[model].items() if math.prod(shape) < 2**26}
    names = list(reversed(shapes))
    tensors = [torch.empty(shapes[name]) for name in names]
    found, _ = torch.distributed._compute_bucket_assignment_by_size(
        tensors, [torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20]
    )
    assert groups.ddp_buckets(shapes) == [[names[i] for i in bucket] for bucket in found]


def test_names_by_hand() -> None:
    shapes = MODELS["resnet50"]
    large = [name for name, shape in shapes.items() if math.prod(shape) >= 1024]
    # Groups of 32 MiB: four of 102 MB; two allreduces each; the active-rank query.
    assert groups.torch_cache_names(GlobalQSGD(8), shapes) == 161 + 2 * 4 + 1
    assert groups.tensorflow_cache_names(GlobalQSGD(8), shapes) == 161 + 2 * len(large)
    assert groups.tensorflow_cache_names(QSGD(4, exchange="allgather"), shapes) == 161 + len(large) + 1
    assert groups.torch_cache_names(GlobalQSGD(8), {"bias": (10,)}) == 1
    assert elements(shapes) > 0
