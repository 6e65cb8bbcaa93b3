"""Gradients that share collectives, and the number of Horovod response cache entries.

These functions reproduce the frontends' decisions for given shapes, without a framework.
"""

from __future__ import annotations

from math import prod

from horovod_quant.analysis.models import Shapes
from horovod_quant.frontends.arguments import GROUP_BYTES, MIN_ELEMENTS
from horovod_quant.frontends.groups import Member, cut
from horovod_quant.frontends.policy import Policy
from horovod_quant.schemes.base import Allreduce, Scheme


def compressed_names(scheme: Scheme, shapes: Shapes) -> list[str]:
    """Return the names of gradients large enough to be compressed, in order."""
    policy = Policy(scheme, MIN_ELEMENTS)
    return [name for name, shape in shapes.items() if policy.scheme_for(name, prod(shape)) is not None]


def torch_groups(scheme: Scheme, shapes: Shapes, group_bytes: int = GROUP_BYTES) -> list[list[str]]:
    """Return the names in each PyTorch group, in order of completion.

    Args:
        scheme: scheme of all gradients.
        shapes: shapes of all float32 parameters, in the order of registration.
        group_bytes: see `horovod_quant.frontends.frontend.BaseCompressor`.
    """
    names = reversed(compressed_names(scheme, shapes))
    members = [Member(name, scheme, 4 * prod(shapes[name])) for name in names]
    return cut(members, group_bytes, len(shapes))


DDP_BUCKET_BYTES = (2**20, 25 * 2**20)
"""Byte limits of DDP's first bucket and of others (PyTorch 2.13)."""


def ddp_buckets(shapes: Shapes) -> list[list[str]]:
    """Return the names in each default DDP bucket, in order of completion."""
    buckets: list[list[str]] = [[]]
    size = 0
    for name in reversed(shapes):
        if size >= DDP_BUCKET_BYTES[len(buckets) > 1]:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += 4 * prod(shapes[name])
    return buckets if shapes else []


def torch_cache_names(scheme: Scheme, shapes: Shapes) -> int:
    """Return the number of response cache entries of a step in PyTorch.

    They are each gradient's operation, each group's collectives, and the active-rank query.
    """
    groups = len(torch_groups(scheme, shapes))
    return len(shapes) + groups * len(scheme.collectives) + (groups > 0)


def tensorflow_cache_names(scheme: Scheme, shapes: Shapes) -> int:
    """Return the number of response cache entries in TensorFlow without ``groups=``.

    Each gradient has separate collectives, and only workers that gather make the active-rank query.
    """
    compressed = len(compressed_names(scheme, shapes))
    gathers = any(collective.request is not Allreduce for collective in scheme.collectives)
    return len(shapes) + compressed * len(scheme.collectives) + (gathers and compressed > 0)
