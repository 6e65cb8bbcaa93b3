"""EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning.

Vargaftik, Ben Basat, Portnoy, Mendelson, Ben-Itzhak, Mitzenmacher. ICML 2022; with one bit it is DRIVE (NeurIPS 2021).
A random rotation makes every bucket look Gaussian, so that one table of levels suits all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, get_args

import numpy as np

from horovod_quant.analysis.bounds import eden_error, eden_variance_factor
from horovod_quant.kernels.arrays import no_part
from horovod_quant.kernels.keys import KeyChain
from horovod_quant.kernels.layout import TILE, tiles
from horovod_quant.kernels.span import as_array
from horovod_quant.schemes.base import (
    Allgather,
    Alltoall,
    Collective,
    Decoded,
    Exchange,
    Extent,
    Gradient,
    Scheme,
    Workers,
    checked,
    require_bool,
    require_choice,
    require_int,
    split_points,
    use_plain_ints,
)
from horovod_quant.schemes.chunks import Segment, chunks_of
from horovod_quant.schemes.qsgd import ALLGATHER, ALLTOALL, AUTO, Route
from horovod_quant.schemes.registry import register
from horovod_quant.schemes.rotated_codes import Coder

DEFAULT_BITS = 3
MOST_BITS = 4

MOST_GATHERED = 2
"""Workers with whom ``exchange="auto"`` is an allgather: it has half of the error of an alltoall of as many bits.

For that error an alltoall needs half a bit more each way (a bit is worth a factor of 3.7). An allgather sends
``(n - 1) b`` bits an element, that alltoall ``(n - 1) / n (2 b + 1)``: fewer with 3 workers, but for one bit, and more
with 2. The kernels' time agrees: an element takes 1.1 ns to encode and 0.75 to decode (AVX-512, one thread), so an
allgather of 2 takes 2.6 and an alltoall 3.1; of 3 both take about 3.2, and of 4 the allgather 4.1 and the alltoall 2.9.
"""

IN_COMMON = 0.1
"""Share of a gradient's energy that ``server_bits="auto"`` takes all workers to have in common.

4 workers' gradients of a character model had as much in the middle of a training, and 16 workers' a fifth of it. The
larger it is, the less do the workers' errors count beside the server's.
"""


class Widths(NamedTuple):
    """What some number of workers run."""

    bits: int
    server_bits: int
    exchange: Route
    trellis: bool = False

    def bits_sent(self, workers: int) -> int:
        """For an element, by one of so many workers, times ``n / (n - 1)``."""
        return workers * self.bits if self.exchange == ALLGATHER else self.bits + self.server_bits

    def error(self, ratio: float = 1.0) -> float:
        """See `horovod_quant.analysis.bounds.eden_error`."""
        server_bits = None if self.exchange == ALLGATHER else self.server_bits
        return eden_error(self.bits, server_bits, ratio, self.trellis)

    def up(self, kernels: Any) -> Coder:
        """Of what the workers send."""
        return Coder(kernels, self.bits, self.trellis)

    def down(self, kernels: Any) -> Coder:
        """Of what all workers receive in the end."""
        bits = self.bits if self.exchange == ALLGATHER else self.server_bits
        return Coder(kernels, bits, self.trellis)


@register
@dataclass(frozen=True)
class EDEN(Scheme):
    """EDEN: a random rotation, ``2^bits`` Lloyd-Max levels for a Gaussian, and one scale per bucket of 1,024 elements.

    1. Each worker rotates its buckets with its own random signs, rounds to the nearest level, and chooses the scale
       that makes the component along the bucket exact.
    2. An alltoall sends all workers' codes and scales of a chunk to the worker that serves the chunk.
    3. The server decodes and averages them, and encodes the average with a different rotation: reusing a worker's would
       make the result biased.
    4. An allgather distributes the servers' codes and scales.

    With two workers there is an allgather after step 1 instead; each worker decodes and adds all workers' codes.

    The number of the step that selected the signs is sent with the codes, one word for each server's part of a
    gradient, so the workers' counts need not be equal.

    Rounding adds a constant fraction of the squared gradient, whatever its distribution: 0.57, 0.13, 0.036 or 0.0096
    for 1 to 4 bits. The error spreads evenly over the bucket: a bucket of zeros stays zero, zeros among other elements
    do not.

    The mean over the rotations is not exactly the bucket. The largest bias found in a bucket of d elements, relative to
    its norm, is below 1.7, 1, 1 or 0.5 / sqrt(d) for 1 to 4 bits, where two to four elements of nearly equal magnitude,
    or one beside tiny ones, are most of the norm. d is 1,024, or the power of two from 32 on that a tensor's last
    bucket is padded to. A bucket of normally distributed elements has 0.3% with 1 bit and d = 32, and less otherwise.

    Args:
        bits: width of a code, 1 to 4; 3 unless ``error`` is given. A bucket whose largest magnitude is below 2^-96
            counts as 0. An element outside float32's range turns its bucket into NaN.
        server_bits: width of the servers' codes. The error of the second rounding does not shrink with the number of
            workers, so ``"auto"`` uses the fewest bits, at least ``bits``, that keep it to at most twice the remaining
            error of the workers: ``bits`` for up to 11 workers, one more from 12, two more from about 70, at most 4.
            An allgather has no second rounding.
        exchange: ``"allgather"``, ``"alltoall"``, or ``"auto"``: an allgather for two workers, an alltoall for more.
        error: instead of ``bits``, the largest acceptable squared error of the average, relative to its own square,
            for gradients that have nothing in common. The exchange with the fewest bytes that achieves it is used,
            given the number of workers. An alltoall achieves 0.0193 or more, an allgather 0.0096; with a trellis it is
            0.0134 and 0.0067.
        trellis: trellis-coded quantization (Marcellin and Fischer, 1990): twice the levels for the same bits, and the
            codes before it decide which half of them a code chooses from. Rounding then adds 0.48, 0.10, 0.026 or
            0.0067 of the squared gradient for 1 to 4 bits. Encoding takes about twice as long.

    Raises:
        ValueError: an argument is out of range, or ``error`` is combined with ``bits`` or ``server_bits``.
    """

    bits: int | None = None
    server_bits: int | str = AUTO
    exchange: Route = AUTO
    error: float | None = None
    trellis: bool = False

    presets = {"eden": {}, "eden-trellis": {"trellis": True}}
    compared = ("eden-3",)
    unbiased = True
    bucket_size = TILE

    def __post_init__(self) -> None:
        require_choice("exchange", self.exchange, get_args(Route))
        require_bool("trellis", self.trellis)
        if isinstance(self.server_bits, str) and self.server_bits != AUTO:
            raise ValueError(
                f"server_bits={self.server_bits!r}: use 'auto', or an integer from 1 to {MOST_BITS}"
            )
        if self.server_bits != AUTO:
            require_int("server_bits", self.server_bits, 1, MOST_BITS)
            use_plain_ints(self, "server_bits")
        if self.error is not None:
            self._check_error(self.error)
            return
        if self.bits is None:
            object.__setattr__(self, "bits", DEFAULT_BITS)
        require_int("bits", self.bits, 1, MOST_BITS)
        use_plain_ints(self, "bits")

    def _check_error(self, error: Any) -> None:
        for name, usual in (("bits", None), ("server_bits", AUTO)):
            if getattr(self, name) != usual:
                raise ValueError(
                    f"error={error!r} chooses the bits; leave out either {name}={getattr(self, name)!r} or the error"
                )
        if isinstance(error, bool) or not isinstance(error, (int, float)) or not 0 < error < math.inf:
            raise ValueError(f"error={error!r}: use a positive number, for example 0.1")
        least = min(widths.error() for widths in self._possible())
        if error < least:
            raise ValueError(
                f"error={error!r}: exchange={self.exchange!r} has at least {least:.6f}"
                + ("; an allgather has half of that" if self.exchange == ALLTOALL else "")
                + ("" if self.trellis else "; trellis=True has 30% less")
            )

    @property
    def more_work(self) -> bool:
        return self.trellis

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """For ``exchange="auto"``, those used with many workers."""
        gathered = Collective(Allgather, "int32")
        return (gathered,) if self.exchange == ALLGATHER else (Collective(Alltoall, "int32"), gathered)

    def for_workers(self, workers: Workers) -> Scheme:
        """This scheme with all choices made that depend on the number of workers."""
        return replace(self, error=None, **self.widths(workers.size)._asdict())

    def levels_left(self, workers: int, hosts: int) -> int | None:
        return None if self.bits is None else 1 << (self.bits - 1)

    def relative_error(self, workers: int, hosts: int) -> float:
        """The same for any number of workers with the same settings: errors average out, as such gradients do."""
        return math.sqrt(self.widths(workers).error())

    def widths(self, workers: int) -> Widths:
        """What so many workers run."""
        if self.error is not None:
            fitting = [widths for widths in self._possible() if widths.error() <= self.error]
            ratio = _usual_ratio(workers)
            return min(fitting, key=lambda widths: (widths.bits_sent(workers), widths.error(ratio)))
        assert self.bits is not None
        exchange, server_bits = self.exchange, self.server_bits
        if exchange == AUTO:
            exchange = ALLGATHER if workers <= MOST_GATHERED else ALLTOALL
        if isinstance(server_bits, str):
            server_bits = balanced(self.bits, workers, self.trellis)
        return Widths(self.bits, server_bits, exchange, self.trellis)

    def _possible(self) -> list[Widths]:
        """What there is to choose from by error."""
        every = range(1, MOST_BITS + 1)
        gathered = [Widths(bits, bits, ALLGATHER, self.trellis) for bits in every]
        served = [
            Widths(bits, server_bits, ALLTOALL, self.trellis) for bits in every for server_bits in every
        ]
        return [widths for widths in gathered + served if self.exchange in (AUTO, widths.exchange)]

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        widths = self.widths(workers.size)
        if widths.exchange == ALLGATHER:
            return _exchange_all(gradients, workers, widths.up(kernels))
        return _exchange_chunks(gradients, workers, widths.up(kernels), widths.down(kernels))

    def received_parts(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]]:
        """All workers' steps, codes and scales, or the servers'."""
        widths = self.widths(workers.size)
        if widths.exchange == ALLGATHER:
            coder = widths.up(None)
            return [(sum(coder.length(count) for count in elements), np.int32)] * workers.size
        coder, served = widths.down(None), _served(elements, workers)
        return [(at[-1], np.int32) for at in coder.offsets(served)]

    def opened(
        self, received: Sequence[Any], extents: Sequence[Extent], workers: Workers, kernels: Any
    ) -> Decoded:
        widths = self.widths(workers.size)
        if widths.exchange == ALLGATHER:
            return _opened_all(received, extents, widths.up(kernels))
        return _opened_chunks(received, extents, workers, widths.down(kernels))


def balanced(bits: int, workers: int, trellis: bool = False) -> int:
    """What ``server_bits="auto"`` is."""
    left = _usual_ratio(workers) * eden_variance_factor(bits, trellis)
    fitting = (more for more in range(bits, MOST_BITS) if eden_variance_factor(more, trellis) <= 2 * left)
    return next(fitting, MOST_BITS)


def _usual_ratio(workers: int) -> float:
    """See `horovod_quant.analysis.bounds.energy_ratio`."""
    return 1 / (1 + (workers - 1) * IN_COMMON)


LARGEST_STEP = 2**31 - 1
"""A step counts on from 0 after it: what an int32 word holds."""


def _values(gradient: Gradient, segment: Segment) -> Any:
    return as_array(_held(gradient, segment))


def _held(gradient: Gradient, segment: Segment) -> Any:
    is_all = segment.elements == gradient.elements
    return gradient.held if is_all else gradient.held[segment.start : segment.stop]


def _average(coder: Coder, pieces: Sequence[Any], keys: KeyChain, elements: int, start: int) -> Any:
    out = coder.kernels.target(elements)
    return coder.add(pieces, keys, 1.0 / len(pieces), elements, out, start)


def _as_it_is(array: Any, out: Any) -> Any:
    return array


def _own_step(gradient: Gradient) -> int:
    return gradient.step & LARGEST_STEP


def _encoded(
    gradients: Sequence[Gradient], segments: Sequence[Segment], workers: Workers, coder: Coder
) -> Any:
    """What this worker sends of its gradients' segments, one after another."""
    kernels, own = coder.kernels, [gradients[segment.gradient] for segment in segments]
    starts = [each.start + segment.start for each, segment in zip(own, segments)]
    steps = [_own_step(each) for each in own]
    if hasattr(kernels, "Table"):
        values = list(map(_held, own, segments))
        return coder.encode_each(values, [each.keys for each in own], "worker", steps, workers.rank, starts)
    parts = []
    for gradient, segment, step, start in zip(own, segments, steps, starts):
        key = gradient.keys.key("worker", step, workers.rank)
        values_of, fill = partial(_values, gradient, segment), partial(kernels.step_word, step)
        parts += coder.parts(segment.elements, values_of, fill, key, start)
    return kernels.assemble([*parts, no_part(np.int32)])


def _averaged(
    gradients: Sequence[Gradient],
    segments: Sequence[Segment],
    received: Sequence[Any],
    up: Coder,
    down: Coder,
) -> Any:
    """What the server of these segments sends: their averages over the workers, of whom it has received them."""
    kernels, own = up.kernels, [gradients[segment.gradient] for segment in segments]
    chains = [each.keys for each in own]
    starts = [each.start + segment.start for each, segment in zip(own, segments)]
    counts = [segment.elements for segment in segments]
    # Signs of the first worker's step, which all servers of a gradient know: they do not depend on who serves what.
    if hasattr(kernels, "Table"):
        bounds, total = split_points(counts), kernels.target(sum(counts))
        averages = [total[low:high] for low, high in zip(bounds, bounds[1:])]
        steps = up.add_each(received, chains, "worker", 1.0 / len(received), averages, starts)
        return down.encode_each(averages, chains, "server", steps, 0, starts)
    parts = []
    for chain, count, start, at in zip(chains, counts, starts, up.offsets([segments])[0]):
        pieces = [piece[at:] for piece in received]
        average = partial(_average, up, pieces, chain, count, start)
        step = pieces[0][:1]
        key = kernels.key_of_word(chain, "server", step)
        parts += down.parts(count, average, partial(_as_it_is, step), key, start)
    return kernels.assemble([*parts, no_part(np.int32)])


@lru_cache(maxsize=64)  # every step's gradients have the same lengths
def _whole(elements: tuple[int, ...]) -> list[Segment]:
    return [Segment(i, 0, count, 0, tiles(count)) for i, count in enumerate(elements)]


def _exchange_all(gradients: Sequence[Gradient], workers: Workers, coder: Coder) -> Exchange:
    # With signs that all workers share, one inverse rotation would do for the sum. But equal gradients would have equal
    # errors then, of which n times as much is left (with half of the energy in common 4% more at one bit, 2% at three),
    # and of two workers' exchange that would save no more than a quarter of the kernels' time.
    lengths = [coder.length(gradient.elements) for gradient in gradients]
    payload = _encoded(gradients, _whole(tuple(each.elements for each in gradients)), workers, coder)
    # An empty array does not tell how many there are.
    known = None if sum(lengths) else [0] * workers.size
    payloads = yield from checked(Allgather(payload, [4 * length for length in lengths], known), workers)
    return _opened_all(payloads, [gradient.extent for gradient in gradients], coder)


def _opened_all(payloads: Sequence[Any], extents: Sequence[Extent], coder: Coder) -> Decoded:
    at = split_points([coder.length(extent.elements) for extent in extents])

    def write(i: int, factor: float, out: Any) -> Any:
        keys, elements, start = extents[i]
        pieces = [payload[at[i] : at[i + 1]] for payload in payloads]
        return coder.add(pieces, keys, factor, elements, out, start)

    def write_all(factor: float, outs: Sequence[Any]) -> None:
        chains, starts = [extent.keys for extent in extents], [extent.start for extent in extents]
        coder.add_each(payloads, chains, "worker", factor, outs, starts)

    at_once = write_all if hasattr(coder.kernels, "Table") else None
    return Decoded(len(payloads), write, write_all=at_once, received=payloads)


def _served(elements: Iterable[int], workers: Workers) -> list[list[Segment]]:
    """What each server serves."""
    chunks = chunks_of(elements, workers.size)
    return [chunks.segments(server) for server in range(workers.size)]


def _exchange_chunks(gradients: Sequence[Gradient], workers: Workers, up: Coder, down: Coder) -> Exchange:
    served = _served((gradient.elements for gradient in gradients), workers)

    def sizes(coder: Coder) -> list[int]:
        """Bytes of each gradient's segments."""
        found = [0] * len(gradients)
        for segment in (segment for own in served for segment in own):
            found[segment.gradient] += 4 * coder.length(segment.elements)
        return found

    sent = _encoded(gradients, [segment for own in served for segment in own], workers, up)
    request = Alltoall(sent, [at[-1] for at in up.offsets(served)], sizes(up))
    received = yield from checked(request, workers)

    gathered = yield from checked(
        Allgather(
            _averaged(gradients, served[workers.rank], received, up, down),
            [size / workers.size for size in sizes(down)],
            [at[-1] for at in down.offsets(served)],
        ),
        workers,
    )
    return _opened_chunks(gathered, [gradient.extent for gradient in gradients], workers, down)


def _opened_chunks(
    gathered: Sequence[Any], extents: Sequence[Extent], workers: Workers, coder: Coder
) -> Decoded:
    kernels, served = coder.kernels, _served((extent.elements for extent in extents), workers)

    @cache
    def collected() -> tuple[list[list], list[list], list[Any]]:
        """Each gradient's codes and scales, by servers, and its key."""
        # Segments end where buckets do, so one after another they are what the whole gradient's codes would be.
        words: list[list] = [[np.zeros(0, np.int32)] for _ in extents]
        scales: list[list] = [[np.zeros(0, np.float32)] for _ in extents]
        keys = [extent.keys.key("server", 0) for extent in extents]
        for own, starts, piece in zip(served, coder.offsets(served), gathered):
            for segment, at in zip(own, starts):
                codes, units = coder.open(piece[at:], segment.elements)
                words[segment.gradient].append(codes)
                scales[segment.gradient].append(units)
                chain = extents[segment.gradient].keys
                keys[segment.gradient] = kernels.key_of_word(chain, "server", piece[at : at + 1])
        return words, scales, keys

    def write(i: int, factor: float, out: Any) -> Any:
        words, scales, keys = collected()
        return kernels.decode_rotated(
            kernels.concatenate(words[i]),
            kernels.concatenate(scales[i]),
            coder.bits,
            keys[i],
            factor * workers.size,
            out,
            extents[i].start,
            coder.trellis,
        )

    def write_all(factor: float, outs: Sequence[Any]) -> None:
        for own, piece in zip(served, gathered):
            chains = [extents[segment.gradient].keys for segment in own]
            parts = [outs[segment.gradient][segment.start : segment.stop] for segment in own]
            starts = [extents[segment.gradient].start + segment.start for segment in own]
            coder.add_each([piece], chains, "server", factor * workers.size, parts, starts)

    at_once = write_all if hasattr(kernels, "Table") else None
    return Decoded(workers.size, write, write_all=at_once, received=gathered)
