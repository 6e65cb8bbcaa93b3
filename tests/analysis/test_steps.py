"""Steps, and the bandwidth below which a method pays."""

from __future__ import annotations

import pytest
from modelling import SPEEDS, wires

from horovod_quant.analysis.cost_model import CONTROL_BYTES, NONE, Setting
from horovod_quant.analysis.network import PAYLOAD_SHARE
from horovod_quant.analysis.steps import Step, break_even_bandwidth, step_seconds
from horovod_quant.schemes import QSGD


def test_a_step_by_hand() -> None:
    setting, step = Setting({"only": (10**6,)}, wires(2), SPEEDS), Step(0.1)
    assert step_seconds(NONE, setting, step) == pytest.approx(0.104)


def test_the_break_even_bandwidth_by_hand() -> None:
    """Of 8e6 elements among 3: none sends 4.4e7 bytes, QSGD 8.3e6 for 33e6 ns of kernels, and its control tensor."""
    setting, step = Setting({"only": (8_192_000,)}, wires(3), SPEEDS), Step(0.0)
    scheme = QSGD(4)
    kernels = 8_192_000 * (1 + 1 + 2) * 1e-9
    ring = 4 / 3
    saved = ring * 4 * 8_192_000 - 2 * (8_192_000 // 2 + 4 * 8000) - ring * CONTROL_BYTES
    found = break_even_bandwidth(scheme, setting, step)
    assert PAYLOAD_SHARE * found == pytest.approx(saved / kernels, rel=0.01)
    below, above = (setting.with_network(bandwidth=factor * found) for factor in (0.9, 1.1))
    assert step_seconds(scheme, below, step) < step_seconds(NONE, below, step)
    assert step_seconds(scheme, above, step) > step_seconds(NONE, above, step)


def test_free_kernels_always_pay_and_more_bytes_never() -> None:
    few, many = (Setting({"only": (10**7,)}, wires(hosts), SPEEDS) for hosts in (4, 64))
    step = Step(0.0)
    # Among 64 workers an allgather of 8 bits an element sends 63 bytes where float32 sends 7.9.
    assert break_even_bandwidth(QSGD(8, exchange="allgather"), many, step) == 0
    assert break_even_bandwidth(NONE, few, step) == 0


def test_steps_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="backward=2.0"):
        Step(1.0, 2.0)
