"""A step's seconds with each method over bandwidths and over hosts: what `advise` draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovod_quant.analysis.advice import Choice, refusal_of
from horovod_quant.analysis.cost_model import Setting
from horovod_quant.analysis.steps import Step, step_seconds, with_bandwidth


class Curve(NamedTuple):
    """Seconds of a step at each place; None where the method is impossible."""

    name: str
    steps: list[float | None]


def over_bandwidths(
    chosen: Sequence[Choice], setting: Setting, step: Step, bandwidths: Sequence[float]
) -> list[Curve]:
    """A step's seconds at each bandwidth, in bytes per second."""
    return _curves(chosen, step, [with_bandwidth(setting, bandwidth) for bandwidth in bandwidths])


def over_hosts(chosen: Sequence[Choice], setting: Setting, step: Step, hosts: Sequence[int]) -> list[Curve]:
    """A step's seconds with each number of hosts, all with as many workers."""
    return _curves(chosen, step, [setting.with_network(hosts=number) for number in hosts])


def _curves(chosen: Sequence[Choice], step: Step, settings: Sequence[Setting]) -> list[Curve]:
    def seconds(choice: Choice, setting: Setting) -> float | None:
        return None if refusal_of(choice, setting) else step_seconds(choice.method, setting, step)

    return [Curve(choice.name, [seconds(choice, setting) for setting in settings]) for choice in chosen]
