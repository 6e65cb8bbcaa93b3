"""The tables of docs/advise.md and docs/model.md are what the model computes, and no recommendation there is beaten."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import pytest
from helpers import by_default
from parallel.launching import ROOT

sys.path.append(str(ROOT / "scripts"))

import advise_tables
import kept_speeds
from advise_tables import CLUSTERS, LOGGED, TREE, Cluster

from horovod_quant.analysis.recommendation import best_of

SPEEDS = advise_tables.kernel_speeds(measure=False)
PAGE, EVIDENCE = advise_tables.PAGE.read_text(), advise_tables.EVIDENCE.read_text()
WITHIN = 0.1


def test_speeds_survive_json() -> None:
    assert kept_speeds.from_json(json.loads(json.dumps(kept_speeds.as_json(SPEEDS)))) == SPEEDS


@pytest.mark.parametrize(
    "cluster", by_default([CLUSTERS[4], CLUSTERS[10]], CLUSTERS), ids=lambda cluster: cluster.title
)
def test_a_cluster_is_on_the_page_and_its_recommendation_is_not_beaten(cluster: Cluster) -> None:
    rows = advise_tables.modelled(cluster, SPEEDS)
    assert advise_tables.cluster_line(cluster, rows) in PAGE
    everything = advise_tables.modelled(cluster, SPEEDS, everything=True)
    best = best_of(rows)
    assert advise_tables.beaten_by(best, everything) == []


def test_the_clusters_are_of_all_sizes() -> None:
    workers = [cluster.hosts * cluster.per_host for cluster in CLUSTERS]
    assert (len(CLUSTERS), min(workers), max(workers)) == (12, 2, 256)
    assert {cluster.per_host for cluster in CLUSTERS} == {1, 8}


def test_a_rival_that_beats_the_recommendation_is_named() -> None:
    """An invented step: the check must be able to fail."""
    rows = advise_tables.modelled(CLUSTERS[0], SPEEDS)
    best = best_of(rows)
    assert advise_tables.beaten_by(best, [best._replace(step=best.step / 1.2)]) == [best.name]


def test_what_others_measured_is_predicted_within_a_tenth() -> None:
    """With their tree in place of the ring, nothing fitted but what a step computes; see the page."""
    assert advise_tables.logged_table() in EVIDENCE
    for logged in LOGGED:
        found, _ = advise_tables.predictions(logged, TREE, "nvlink3-pair")
        measured: dict[str, Sequence[float]] = {"NVLink": logged.nvlink, "host's memory": logged.host_memory}
        for link, (float32, quantized) in measured.items():
            assert found[link].float32 == pytest.approx(float32, rel=WITHIN)
            assert found[link].quantized == pytest.approx(quantized, rel=WITHIN)
            assert found[link].ratio == pytest.approx(float32 / quantized, rel=0.04)


def test_the_hierarchical_table_and_what_it_shows_are_on_its_page() -> None:
    table, page = advise_tables.hierarchical_table(SPEEDS), advise_tables.HIERARCHICAL.read_text()
    assert table in page
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    steps = {name: [int(cell.replace(",", "")) for cell in cells[-3:]] for name, *cells in rows}
    in_8_bits = {name: steps[f"{name}, inside=8"] for name in steps if f"{name}, inside=8" in steps}
    saved = [a - b for name, other in in_8_bits.items() for a, b in zip(steps[name], other)]
    assert f"`inside=8` saves {min(saved)} to {max(saved)} ms of a step" in page
    flat, nested = steps["global-qsgd-8"], in_8_bits["global-qsgd-8 hierarchical"]
    less = [1 - b / a for a, b in zip(flat, nested)]
    assert f"GlobalQSGD then\ntakes {min(less):.0%} to {max(less):.0%} less than without a hierarchy" in page
