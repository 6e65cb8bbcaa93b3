"""Recommendations: never what does not pay, what is too rough, or what is another optimizer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pytest
from helpers import examples, extended
from hypothesis import given
from hypothesis import strategies as st
from modelling import LAYERS, SPEEDS, wires

from horovod_quant.analysis.advice import LEAST_SPEED_UP, MOST_NMSE, choices, considered, row_of, with_limit
from horovod_quant.analysis.assumptions import assumptions
from horovod_quant.analysis.cost_model import CONTROL_BYTES, Setting, exchange_cost
from horovod_quant.analysis.network import Network
from horovod_quant.analysis.recommendation import (
    AS_FAST,
    FEW,
    best_few,
    best_of,
    fallen_out,
    is_fine,
    recommend,
)
from horovod_quant.analysis.steps import Step
from horovod_quant.cli.advise_plot import step_times
from horovod_quant.frontends import methods
from horovod_quant.schemes import QSGD, BinSGDM, Hierarchical, registry

NAMES = ["fp16", "global-qsgd-8", "global-qsgd-4", "qsgd-4", "qsgd-2", "nuqsgd-4", "binsgdm"]
STEP = Step(0.1)


def rows_of(chosen, setting: Setting) -> list:
    return [row_of(choice, setting, STEP) for choice in chosen]


def advised(network: Network, names=NAMES, shapes=LAYERS):
    setting = Setting(shapes, network, SPEEDS)
    rows = rows_of(choices(names, network), setting)
    rows = [with_limit(row, setting, STEP) for row in rows]
    return {row.name: row for row in rows}, recommend(rows)


def test_a_slow_network_calls_for_compression() -> None:
    rows, found = advised(wires(4, payload=12.5e6), ["fp16", "global-qsgd-8", "qsgd-4"])
    assert found.method == "global-qsgd-8"
    row = rows["global-qsgd-8"]
    assert found.faster.startswith(f"{row.gain:.2f}x faster to the same loss; a step takes ")
    assert f"its nmse is {row.nmse:.2g}: at most {100 * row.nmse:.2g}% more steps" in found.why


def test_a_fast_network_calls_for_nothing() -> None:
    rows, found = advised(wires(4, payload=1e12))
    assert found.method == "none"
    assert found.faster == "no method is meaningfully faster"
    assert found.why.startswith("Without compression the step communication adds ")
    assert not any(row.pays for row in rows.values())


def test_one_level_is_too_few() -> None:
    rows, found = advised(wires(4, payload=12.5e6), ["fp16", "global-qsgd-4"])
    assert rows["global-qsgd-4"].levels == 1
    assert rows["global-qsgd-4"].step < rows["fp16"].step
    assert found.method == "fp16"
    assert "though its steps are shorter: global-qsgd-4, whose only level would add 1.1 times" in found.why


def test_if_only_rough_methods_pay_none_stays() -> None:
    _, found = advised(wires(4, payload=12.5e6), ["global-qsgd-4"])
    assert found.method == "none"
    assert found.why.startswith("Not recommended, though its steps are shorter: global-qsgd-4, ")


def test_another_optimizer_is_only_mentioned() -> None:
    _, found = advised(wires(4, payload=12.5e6), ["global-qsgd-8", "binsgdm"])
    assert found.method == "global-qsgd-8"
    assert "binsgdm is another optimizer, hvq.optim.BinSGDM: " in found.why
    assert "2 times the steps" in found.why
    _, found = advised(wires(4, payload=12.5e6), ["binsgdm"])
    assert found.method == "none"


def test_impossible_methods_have_a_reason() -> None:
    rows, _ = advised(wires(200))
    assert "200 workers need bits >= 9" in rows["global-qsgd-8"].refusal
    assert rows["global-qsgd-8"].step == math.inf
    rows, _ = advised(wires(4), ["qsgd-4"], shapes={"bias": (10,)})
    assert "every gradient has fewer than 1024 elements" in rows["qsgd-4"].refusal


def test_hierarchical_exchanges_stand_beside_the_others() -> None:
    rows, found = advised(wires(8, 8, payload=12.5e6, local_bandwidth=1e10), ["global-qsgd-8"])
    assert [rows[name].levels for name in ("global-qsgd-8", "global-qsgd-8 hierarchical")] == [1, 15]
    assert found.method == "global-qsgd-8 hierarchical"
    for one_of_each_kind in (wires(8), wires(1, 8)):
        assert [each.name for each in choices(["qsgd-4"], one_of_each_kind)] == ["none", "qsgd-4"]


def test_of_equally_fast_methods_the_finer_one_is_taken() -> None:
    rows, found = advised(wires(2, payload=1e8), ["qsgd-4-bucket1024", "nuqsgd-4"])
    assert rows["nuqsgd-4"].step == pytest.approx(rows["qsgd-4-bucket1024"].step, rel=0.01)
    assert found.method == "qsgd-4-bucket1024"


def test_names_are_taken_once_and_none_comes_first() -> None:
    found = choices(["fp16", "none", "fp16", "qsgd-04"], wires(4))
    assert [choice.name for choice in found] == ["none", "fp16", "qsgd-4"]
    with pytest.raises(ValueError, match="no method 'zip'"):
        choices(["zip"], wires(4))


@examples(40)
@given(
    st.builds(
        Network,
        hosts=st.integers(1, 40),
        workers_per_host=st.integers(1, 4),
        bandwidth=st.floats(1e6, 1e11),
        cores_per_worker=st.floats(0.2, 4),
    ),
)
def test_what_is_recommended_pays_and_is_fine_enough(network: Network) -> None:
    rows, found = advised(network, shapes={"a": (300, 1000), "b": (100,)})
    row = rows[found.method]
    if found.method != "none":
        assert row.gain >= LEAST_SPEED_UP
        assert row.nmse <= MOST_NMSE
    for other in rows.values():
        if other.refusal is None and is_fine(other, MOST_NMSE):
            assert not other.pays or row.to_loss <= AS_FAST * other.to_loss


def test_the_break_even_bandwidth_is_where_it_stops_to_pay() -> None:
    rows, _ = advised(wires(3, payload=1e8), ["qsgd-4"])
    limit = rows["qsgd-4"].break_even
    assert 0 < limit < math.inf
    setting = Setting(LAYERS, wires(3), SPEEDS)
    settings = [setting.with_network(bandwidth=factor * limit) for factor in (0.9, 1.1)]
    found = [step_times(choice, settings, STEP) for choice in choices(["qsgd-4"], wires(3))]
    (below, above), (slower, faster) = zip(*found)
    assert (below > above, slower > faster) == (True, False)


def test_curves_have_gaps_where_a_method_is_impossible() -> None:
    settings = [Setting(LAYERS, wires(hosts), SPEEDS) for hosts in (2, 7, 8)]
    none, quantized = (step_times(choice, settings, STEP) for choice in choices(["global-qsgd-4"], wires(2)))
    assert all(seconds > 0 for seconds in none)
    assert [math.isnan(seconds) for seconds in quantized] == [False, False, True]


def test_what_is_assumed_of_an_allreduce_and_of_horovod() -> None:
    for controller, ring, coordinator in (
        ("gloo", "one ring", 1),
        ("nccl", "a ring or a tree", 1),
        ("ddp", "one ring", 0),
    ):
        setting = Setting(LAYERS, wires(4, controller=controller), SPEEDS)
        said = " ".join(assumptions(setting, STEP, calibrated=False, rows=[]))
        assert f"An allreduce is {ring} through all workers, whose latencies add up." in said
        assert said.count("Horovod's coordinator was measured with 4 at most") == coordinator


# ---- every method ----------------------------------------------------------------------------------------------------


def names(network: Network, **options) -> list[str]:
    return [choice.name for choice in considered(Setting(LAYERS, network, SPEEDS), **options)]


def test_every_family_of_the_registry_is_considered_with_the_bits_that_fit() -> None:
    found = names(wires(64))
    assert found[:2] == ["none", "fp16"]
    for first, *_ in methods.every_family():
        assert [name for name in found if methods.parse(name).family == first.family], first.family
    # 8 bits leave 64 workers one level; 10 leave them 7, and keep to the error.
    widths = [name for name in found if re.fullmatch("global-qsgd-[0-9]+", name)]
    assert widths == ["global-qsgd-9", "global-qsgd-10", "global-qsgd-11", "global-qsgd-12"]
    assert "eden-3" in found
    assert not any(name.endswith("hierarchical") for name in found)


@pytest.mark.parametrize(("inside", "bits"), [("float32", 32), ("float16", 16), (8, 8 + 32 / 256)])
def test_what_travels_inside_a_host(inside, bits: float) -> None:
    """2 hosts of 4 send each bit inside to 3 of 4, and on the way out the same."""
    network = wires(2, 4)
    *_, nested = choices(["binsgdm"], network, inside)
    assert nested.name == "binsgdm hierarchical"
    assert nested.method == Hierarchical(BinSGDM(), inside)
    option = "" if inside == "float32" else f", inside={inside!r}"
    assert nested.code == f"hvq.BinSGDM(hierarchical=True{option})"
    elements, control_tensors = 8 * 2**20, 2 * 7 / 8 * CONTROL_BYTES * len(LAYERS)
    found = exchange_cost(nested.method, Setting(LAYERS, network, SPEEDS))
    expected = 3 / 4 * elements * (bits + 1) / 8 + elements / 8 / 4 + control_tensors
    assert found.bytes_sent == pytest.approx(expected, rel=0.01)


def test_hierarchical_exchanges_are_considered_where_a_host_has_several_workers() -> None:
    found = names(wires(8, 8))
    assert "global-qsgd-8 hierarchical" in found
    assert "fp16 hierarchical" not in found
    assert not any(name.endswith("hierarchical") for name in names(wires(1, 8)))


def test_another_packages_scheme_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Elsewhere(QSGD):
        presets = {"elsewhere": {"norm": "l2"}, "elsewhere-wide": {"bits": 12}}

    registered = [*registry.registered(), Elsewhere]
    monkeypatch.setattr(registry, "registered", lambda: registered)
    found = names(wires(4))
    assert {"elsewhere-6", "elsewhere-wide"} <= set(found)


def test_all_are_the_others_too() -> None:
    few, everything = names(wires(4)), names(wires(4), everything=True)
    assert set(few) < set(everything)
    assert {"qsgd-16", "eden-1", "global-qsgd-2"} <= set(everything)


def test_the_limit_of_the_error_decides_the_bits() -> None:
    assert "eden-2" in names(wires(4), max_nmse=0.36)
    fine, rough = names(wires(4), max_nmse=0.0004), names(wires(4), max_nmse=1.0)
    assert "qsgd-4" in rough
    assert "qsgd-4" not in fine


def test_the_recommendation_is_by_the_time_to_the_same_loss() -> None:
    """Steps of equal length: the rougher method needs more of them."""
    rows, found = advised(wires(64, payload=1.25e8), ["qsgd-4-alltoall", "global-qsgd-10", "eden-3"])
    for row in rows.values():
        assert row.to_loss == pytest.approx(row.step * (1 + row.nmse))
        assert row.gain == pytest.approx(rows["none"].step / row.to_loss)
    assert found.method == min(rows.values(), key=lambda row: row.to_loss).name
    assert found.code.startswith("hvq.")


def test_another_optimizers_steps_are_counted() -> None:
    rows, _ = advised(wires(4, payload=12.5e6), ["binsgdm"])
    assert rows["binsgdm"].steps == 2
    assert rows["binsgdm"].gain == pytest.approx(rows["binsgdm"].speed_up / 2)


@pytest.mark.parametrize("network", [wires(64, payload=1.25e8), extended(wires(8, 8, payload=3e9))])
def test_the_best_few_are_shown_and_all_others_have_a_reason(network: Network) -> None:
    setting = Setting(LAYERS, network, SPEEDS)
    rows = rows_of(considered(setting), setting)
    best = best_of(rows)
    shown = best_few(rows)
    assert [row.name for row in shown].count("none") == 1
    assert best in shown
    assert best.name == recommend(rows).method
    assert len(shown) <= FEW + 1
    assert len({row.choice.family for row in shown}) == len(shown)
    out = fallen_out(rows, shown)
    families = {line.partition(": ")[0] for line in out}
    assert families | {row.choice.family for row in shown} == {row.choice.family for row in rows}
    reasons = r"too rough: |impossible: |another optimizer|[\d.]+x the time to the same loss, with an nmse of [\de.-]+ "
    assert all(re.match(reasons, line.partition(": ")[2]) for line in out)


@pytest.mark.parametrize("network", [wires(4, payload=1.25e8), extended(wires(6, 2, payload=1e9))])
def test_nothing_among_all_methods_beats_what_the_default_recommends(network: Network) -> None:
    """By more than a tenth, with an error as small."""
    setting = Setting(LAYERS, network, SPEEDS)
    few, everything = (rows_of(considered(setting, everything=every), setting) for every in (False, True))
    best = best_of(few)
    for row in everything:
        if row.refusal is None and is_fine(row, best.nmse):
            assert row.step >= best.step / 1.1, row.name
    assert best_of(everything).name == best.name
