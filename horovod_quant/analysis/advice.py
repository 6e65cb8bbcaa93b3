"""Methods to consider for a cluster, and the performance model's predictions.

Units: seconds, bytes, bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from horovod_quant.analysis.cost_model import NONE, Cost, Method, Setting, exchange_cost, workers_of
from horovod_quant.analysis.groups import MIN_ELEMENTS, compressed_names
from horovod_quant.analysis.network import NCCL, Network
from horovod_quant.analysis.steps import Step, break_even_bandwidth, step_seconds
from horovod_quant.analysis.work import resolved
from horovod_quant.frontends import methods
from horovod_quant.schemes import Hierarchical
from horovod_quant.schemes.base import Scheme
from horovod_quant.schemes.hierarchical import inner_of
from horovod_quant.schemes.inside import FLOAT16_NMSE, FLOAT32, Inside

LEAST_SPEED_UP = 1.05
"""Minimum speed-up at which a method pays: smaller ones are within the model's inaccuracy."""

MOST_NMSE = 0.09
"""Default nmse limit of a recommended method: known trainings tolerate it.

In docs/results.md EDEN with 3 bits has 0.072, exponential Global-QSGD 0.14, and both end within 0.8% of the float32
loss; EDEN with 2 bits has 0.14 or 0.28, depending on its reducers, and ends 1.0% or 1.8% above it.
"""

WIDTHS = 3
"""Numbers of bits modelled per family: the smallest ones within the nmse limit.

A wider one sends more, and has almost nothing left to gain in steps.
"""

HIERARCHICAL = " hierarchical"
"""Suffix of the names of methods whose reduction is hierarchical."""


DDPS_CODE = {
    NONE: "no communication hook",
    methods.FP16: "ddp_model.register_comm_hook(None, default_hooks.fp16_compress_hook)",
}
"""Code of a DDP script for PyTorch's built-in methods."""


class Choice(NamedTuple):
    """A method with its name and code.

    Attributes:
        name: ends in `HIERARCHICAL` if the method is hierarchical.
        method: argument of `exchange_cost`.
        family: the name without the bits.
        code: value of ``compression=`` in a script.
    """

    name: str
    method: Method
    family: str
    code: str


class Row(NamedTuple):
    """The model's predictions for a method.

    Attributes:
        choice: the method and its name.
        refusal: why it is impossible; its step then takes forever.
        exchange: seconds of step communication without overlap with a backward pass.
        cost: cost of step communication in the step.
        step: seconds of a step.
        speed_up: speed-up of a step over none.
        break_even: the bandwidth in bytes per second below which steps are shorter than without compression; 0: never,
            inf: always; None unless `with_limit` computed it.
        levels: number of magnitudes that an element can have; None where that is meaningless.
        nmse: the squared error of the average, divided by the square of the exact average, for gradients like white
            noise; None where that is meaningless or the scheme does not state it.
        steps: relative number of steps to the same loss, see `steps_to_loss`; None if unknown.
    """

    choice: Choice
    refusal: str | None = None
    exchange: float = math.inf
    cost: Cost | None = None
    step: float = math.inf
    speed_up: float = 0.0
    break_even: float | None = None
    levels: int | None = None
    nmse: float | None = None
    steps: float | None = None

    @property
    def name(self) -> str:
        return self.choice.name

    @property
    def hidden(self) -> float:
        """Seconds of step communication that overlap with the backward pass."""
        return 0.0 if self.cost is None else max(self.exchange - self.cost.exposed, 0.0)

    @property
    def own_optimizer(self) -> str | None:
        """Name of the optimizer that this method requires, or None."""
        method = self.choice.method
        return inner_of(method).own_optimizer if isinstance(method, Scheme) else None

    @property
    def is_biased(self) -> bool:
        """True if the average is not known to be unbiased."""
        method = self.choice.method
        return isinstance(method, Scheme) and not inner_of(method).unbiased

    @property
    def to_loss(self) -> float:
        """Seconds for the progress that training without compression makes in one step."""
        return math.inf if self.steps is None else self.step * self.steps

    @property
    def gain(self) -> float | None:
        """Speed-up to the same loss over no compression."""
        return None if self.steps is None else self.speed_up / self.steps

    @property
    def pays(self) -> bool:
        """True if the method reaches the same loss faster.

        With unknown nmse, True if its steps are faster.
        """
        return (self.speed_up if self.gain is None else self.gain) >= LEAST_SPEED_UP


def steps_to_loss(method: Method, nmse: float | None) -> float | None:
    """Return the relative number of steps to the same loss.

    It is None if unknown. For a method with its own optimizer, the recommended number. Otherwise rounding adds noise to
    that of the minibatch: it multiplies the variance by ``1 + nmse``, as if the batch were that much smaller. Where
    noise limits progress, the number of steps grows in proportion, elsewhere less (McCandlish, Kaplan, Amodei and
    others, 2018, "An empirical model of large-batch training"), so this is the most to expect. For biased methods it is
    a guess.
    """
    if isinstance(method, Scheme) and inner_of(method).own_optimizer is not None:
        return inner_of(method).own_steps
    return None if nmse is None else 1 + nmse


def choices(names: Iterable[str], network: Network, inside: Inside = FLOAT32) -> list[Choice]:
    """Return no compression and the named methods, each once.

    Each method's hierarchical reduction follows it if hosts have several workers.

    Args:
        names: names of methods.
        network: the workers.
        inside: intra-node format of hierarchical reductions.

    Raises:
        ValueError: there is no such method.
    """
    found = {}
    for name in (NONE, *names):
        for hierarchical in _kinds(network):
            choice = choice_of(methods.parse(name), hierarchical=hierarchical, inside=inside)
            found[choice.name] = choice
    return list(found.values())


def _kinds(network: Network) -> tuple[bool, ...]:
    """Return the values of ``hierarchical`` worth modelling."""
    return (False, True) if network.workers_per_host > 1 and network.hosts > 1 else (False,)


def considered(
    setting: Setting, max_nmse: float = MOST_NMSE, *, everything: bool = False, inside: Inside = FLOAT32
) -> list[Choice]:
    """Return the registered methods worth modelling on a cluster, no compression first.

    From each family, and from its hierarchical reduction if hosts have several workers: the `WIDTHS` smallest numbers
    of bits that work with the workers and stay within ``max_nmse``, and the next smaller one, which does not, to show
    the reason. From a family where no number of bits does: the last.

    Args:
        setting: the workers and the model.
        max_nmse: limit for `Row.nmse`.
        everything: whether to return all numbers of bits instead.
        inside: intra-node format of hierarchical reductions.
    """
    found: list[Choice] = []
    for family in methods.every_family():
        for hierarchical in _kinds(setting.network) if family[0].scheme_class else (False,):
            members = [choice_of(method, hierarchical=hierarchical, inside=inside) for method in family]
            found += members if everything else _worth_modelling(members, setting, max_nmse)
    return found


def _worth_modelling(members: Sequence[Choice], setting: Setting, max_nmse: float) -> Iterator[Choice]:
    last, good = None, 0
    for choice in members:
        if refusal_of(choice, setting) is None:
            nmse = nmse_of(choice, setting)
            if nmse is None or nmse <= max_nmse:
                if last is not None and not good:
                    yield last
                yield choice
                good += 1
                if good == WIDTHS:
                    return
        last = choice
    if last is not None and not good:
        yield last


def choice_of(method: methods.Method, *, hierarchical: bool = False, inside: Inside = FLOAT32) -> Choice:
    """Return the choice of a method or of its hierarchical reduction."""
    scheme = method.scheme()
    if scheme is None or not hierarchical:
        return Choice(method.name, scheme or method.name, method.family, method.code())
    options = {} if inside == FLOAT32 else {"inside": inside}
    return Choice(
        method.name + HIERARCHICAL,
        Hierarchical(scheme, inside),
        method.family + HIERARCHICAL,
        method.code(hierarchical=True, **options),
    )


def script_code(method: str, code: str, *, ddp: bool) -> str:
    """Return the line of a script that selects a method.

    Args:
        method: the name.
        code: see `Choice`.
        ddp: whether the script uses DDP instead of Horovod.
    """
    if not ddp:
        return f"compression={code}"
    return DDPS_CODE.get(method, f"state = hvq.ddp.register(ddp_model, {code})")


def with_limit(row: Row, setting: Setting, step: Step) -> Row:
    """Return the row with `break_even`, which takes the longest to compute."""
    if row.refusal is not None:
        return row
    return row._replace(break_even=break_even_bandwidth(row.choice.method, setting, step))


def row_of(choice: Choice, setting: Setting, step: Step) -> Row:
    """Return the predictions for a method, except `break_even`."""
    network, method = setting.network, choice.method
    refusal = refusal_of(choice, setting)
    if refusal is not None:
        return Row(choice, refusal)
    cost = exchange_cost(method, setting, backward=step.backward, accelerator=step.accelerator)
    seconds = step.seconds + cost.exposed
    nmse = nmse_of(choice, setting)
    return Row(
        choice,
        None,
        exchange_cost(method, setting).exposed,
        cost,
        seconds,
        step_seconds(NONE, setting, step) / seconds,
        None,
        method.levels_left(network.workers, network.hosts) if isinstance(method, Scheme) else None,
        nmse,
        steps_to_loss(method, nmse),
    )


def nmse_of(choice: Choice, setting: Setting) -> float | None:
    """Return the nmse of a possible method, see `Row`."""
    network, method = setting.network, choice.method
    if not isinstance(method, Scheme):
        return _FLOAT_NMSES[choice.name]
    return method.expected_nmse(network.workers, network.hosts)


_FLOAT_NMSES = {NONE: 0.0, methods.FP16: FLOAT16_NMSE}


def refusal_of(choice: Choice, setting: Setting) -> str | None:
    """Return why a method is impossible there; None if it is possible."""
    scheme = choice.method
    if not isinstance(scheme, Scheme):
        return None
    try:
        resolved(scheme, workers_of(scheme, setting.network))
    except ValueError as error:
        return str(error)
    if setting.network.controller == NCCL and scheme.host_requirement() is not None:
        return f"{scheme.host_requirement()} needs the gradients in the host's memory"
    if setting.network.controller == NCCL and getattr(inner_of(scheme), "trellis", False):
        return "the time of the trellis on a GPU is not known: it depends on the paths that it compares, not on bytes"
    if not compressed_names(scheme, setting.shapes):
        return f"every gradient has fewer than {MIN_ELEMENTS} elements and is sent unchanged"
    return None
