"""BinSGDM: extreme one-bit quantization for communication-efficient large-scale distributed training.

Peng et al. ICLR 2023 submission; published as Birder, NeurIPS 2023. The optimizer's update is one bit per element;
momentum and scale are local to each worker. More than one bit from the reducers is not in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from horovod_quant.codecs.signs import SignAverages, Signs
from horovod_quant.reductions.base import Reduction
from horovod_quant.reductions.scatter_reduce import ScatterReduceAllgather
from horovod_quant.schemes.base import Scheme, Workers, use_int
from horovod_quant.schemes.registry import register

MOST_SERVER_BITS = 8


@register
@dataclass(frozen=True)
class BinSGDM(Scheme):
    """BinSGDM's 1-bit allreduce.

    1. Each worker updates its momentum and scale, and draws one bit per element.
    2. An alltoall sends all workers' bits of a shard to the rank that reduces the shard.
    3. The reducer averages the n bits of each element and draws one bit from the average.
    4. An allgather distributes the reducers' bits.

    A tile (1,024 elements) with a non-finite gradient on any worker decodes to NaN on all workers; one flag bit per
    tile travels with the signs.

    With ``server_bits`` above 1 (not in the paper) the reducers return the average itself, and the optimizer moves each
    element by it instead of by +1 or -1. One bit to the reducers and ``server_bits`` from them are
    ``(1 + server_bits) / 2`` times the default's bytes.

    Args:
        server_bits: bits of an element that the reducers return, 1 to 8. 1: a bit drawn from the average, as in the
            paper. More: a sign, and a magnitude of one bit less. They represent the exact average of up to
            ``2^(server_bits - 1)`` workers, and of any even number of workers below ``2^server_bits``: 3 bits suffice
            for 4 workers. With more workers it is rounded at random, without bias.

    Raises:
        ValueError: an argument is out of range.
    """

    server_bits: int = 1

    compared = ("binsgdm",)
    own_optimizer = "BinSGDM"
    own_steps = 2  # docs/results.md: with the steps of Adam the loss stays above Adam's

    def __post_init__(self) -> None:
        use_int(self, "server_bits", 1, MOST_SERVER_BITS)

    def reduction(self, workers: Workers) -> Reduction:
        gather = Signs() if self.server_bits == 1 else SignAverages(self.server_bits, workers.size)
        return ScatterReduceAllgather(Signs(), gather)
