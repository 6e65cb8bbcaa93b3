"""Recommendations: never what does not pay, what is too rough, or what is another optimizer."""

from __future__ import annotations

import math

import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from modelling import LAYERS, SPEEDS, wires

from horovod_quant.analysis import advice
from horovod_quant.analysis.advice import LEAST_SPEED_UP, MOST_ERROR, choices, compare, recommend
from horovod_quant.analysis.assumptions import assumptions
from horovod_quant.analysis.cost_model import Setting
from horovod_quant.analysis.network import Network
from horovod_quant.analysis.steps import Step

NAMES = ["fp16", "global-qsgd-8", "global-qsgd-4", "qsgdinf-4", "qsgdinf-2", "nuqsgd-4", "binsgdm"]
STEP = Step(0.1)


def advised(network: Network, names=NAMES, hierarchical: bool = False, shapes=LAYERS):
    setting = Setting(shapes, network, SPEEDS)
    rows = compare(choices(names, hierarchical), setting, STEP)
    return {row.name: row for row in rows}, recommend(rows, setting)


def test_a_slow_network_calls_for_compression() -> None:
    rows, found = advised(wires(4, payload=12.5e6), ["fp16", "global-qsgd-8", "qsgdinf-4"])
    assert found.method == "global-qsgd-8"
    assert found.text.startswith("Take global-qsgd-8: a step takes")
    assert "31 levels that the sum of 4 workers leaves" in found.text
    assert f"{rows['global-qsgd-8'].speed_up:.2f} times as fast" in found.text


def test_a_fast_network_calls_for_nothing() -> None:
    rows, found = advised(wires(4, payload=1e12))
    assert found.method == "none"
    assert found.text.startswith("Stay with none: it makes a step")
    assert not any(row.pays for row in rows.values())


def test_one_level_is_too_few() -> None:
    rows, found = advised(wires(4, payload=12.5e6), ["fp16", "global-qsgd-4"])
    assert rows["global-qsgd-4"].levels == 1
    assert rows["global-qsgd-4"].step < rows["fp16"].step
    assert found.method == "fp16"
    assert "Not recommended, though faster: global-qsgd-4, whose only level would add 1.1 times" in found.text


def test_if_only_rough_methods_pay_none_stays() -> None:
    _, found = advised(wires(4, payload=12.5e6), ["global-qsgd-4"])
    assert found.method == "none"
    assert "Stay with none: what is faster is too rough" in found.text


def test_another_optimizer_is_only_mentioned() -> None:
    _, found = advised(wires(4, payload=12.5e6), ["global-qsgd-8", "binsgdm"])
    assert found.method == "global-qsgd-8"
    assert "binsgdm would take" in found.text
    _, found = advised(wires(4, payload=12.5e6), ["binsgdm"])
    assert found.method == "none"


def test_impossible_methods_have_a_reason() -> None:
    rows, _ = advised(wires(200))
    assert "200 workers need bits >= 9" in rows["global-qsgd-8"].refusal
    assert rows["global-qsgd-8"].step is None
    rows, _ = advised(wires(4), ["qsgdinf-4"], shapes={"bias": (10,)})
    assert "every gradient has less than 1024 elements" in rows["qsgdinf-4"].refusal


def test_hierarchical_exchanges_stand_beside_the_others() -> None:
    rows, found = advised(wires(8, 8, payload=12.5e6, local_bandwidth=1e10), ["global-qsgd-8"], True)
    assert [rows[name].levels for name in ("global-qsgd-8", "global-qsgd-8 hierarchical")] == [1, 15]
    assert found.method == "global-qsgd-8 hierarchical"
    assert "15 levels that the sum of 8 hosts leaves" in found.text
    rows, _ = advised(wires(8), ["global-qsgd-8"], True)
    assert "the same as without" in rows["global-qsgd-8 hierarchical"].refusal


def test_of_equally_fast_methods_the_finer_one_is_taken() -> None:
    rows, found = advised(wires(2, payload=1e8), ["qsgdinf-4", "nuqsgd-4"])
    assert rows["nuqsgd-4"].step == pytest.approx(rows["qsgdinf-4"].step, rel=0.01)
    assert found.method == "qsgdinf-4"


def test_names_are_taken_once_and_none_comes_first() -> None:
    assert [choice.name for choice in choices(["fp16", "none", "fp16", "qsgd-04"], False)] == [
        "none",
        "fp16",
        "qsgd-4",
    ]
    with pytest.raises(ValueError, match="no method 'zip'"):
        choices(["zip"], False)


@examples(40)
@given(
    st.builds(
        Network,
        hosts=st.integers(1, 40),
        workers_per_host=st.integers(1, 4),
        bandwidth=st.floats(1e6, 1e11),
        cores_per_worker=st.floats(0.2, 4),
    ),
    st.booleans(),
)
def test_what_is_recommended_pays_and_is_fine_enough(network: Network, hierarchical: bool) -> None:
    rows, found = advised(network, hierarchical=hierarchical, shapes={"a": (300, 1000), "b": (100,)})
    row = rows[found.method]
    if found.method != "none":
        assert row.speed_up >= LEAST_SPEED_UP
        assert row.error <= MOST_ERROR
    for other in rows.values():
        if other.refusal is None and other.error is not None and other.error <= MOST_ERROR:
            assert not other.pays or row.step <= advice.AS_FAST * other.step


def test_the_break_even_bandwidth_is_where_it_stops_to_pay() -> None:
    rows, _ = advised(wires(3, payload=1e8), ["qsgdinf-4"])
    limit = rows["qsgdinf-4"].break_even
    assert 0 < limit < math.inf
    setting = Setting(LAYERS, wires(3), SPEEDS)
    curves = advice.over_bandwidths(choices(["qsgdinf-4"], False), setting, STEP, [0.9 * limit, 1.1 * limit])
    (below, above), (slower, faster) = zip(*(curve.steps for curve in curves))
    assert (below > above, slower > faster) == (True, False)


def test_curves_have_gaps_where_a_method_is_impossible() -> None:
    setting = Setting(LAYERS, wires(2), SPEEDS)
    none, quantized = advice.over_hosts(choices(["global-qsgd-4"], False), setting, STEP, [2, 7, 8])
    assert all(none.steps)
    assert [seconds is None for seconds in quantized.steps] == [False, False, True]


def test_assumptions_grow_with_the_workers() -> None:
    few, many = (
        assumptions(
            setting, STEP, calibrated=False, rows=compare(choices(["global-qsgd-8"], False), setting, STEP)
        )
        for setting in (Setting(LAYERS, wires(hosts, latency=5e-5), SPEEDS) for hosts in (4, 4096))
    )
    assert len(many) > len(few)
    said = " ".join(many)
    assert "8,190 messages, one after another, whose latencies alone take 410 ms" in said
    assert "coordinator" in said
    assert "4,096 workers leave so many levels: 8 bits none" in said
