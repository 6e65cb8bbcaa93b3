"""What scripts/reproduce launches: real trainings, kept one by one, and training steps between hosts of a lab."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from parallel.launching import ROOT

sys.path.append(str(ROOT / "scripts"))

from reproduction import binsgdm, common, eden, running, steps, transformer, transformer_gpu

pytestmark = pytest.mark.parallel

TINY = transformer.SIZES["tiny"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "KEPT", tmp_path / "runs")
    # Tests of another file may have a lab at the same time.
    monkeypatch.setitem(running.LAB, "LAB", "test_runs")


@pytest.mark.extended
def test_a_training_that_has_ended_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    launch = running.launch
    monkeypatch.setattr(
        running, "launch", lambda command, *others: (launched.append(command), launch(command, *others))
    )
    training = transformer.plain("global-qsgd-8")
    first = transformer.trained(TINY._replace(seeds=(0,)), training)
    both = transformer.trained(TINY, training)
    assert transformer.trained(TINY, training) == both
    assert [command[command.index("--seed") + 1 : command.index("--json")] for command in launched] == [
        ["0"],
        ["1"],
    ]
    assert both["losses"][0] == first["losses"][0] != both["losses"][1]
    assert both["float32_bytes_per_step"] > 3 * both["bytes_per_step"]


@pytest.mark.extended
def test_a_failed_run_is_quoted() -> None:
    with pytest.raises(running.RunFailed, match="--steps 0: use at least 1"):
        transformer.trained(TINY, transformer.plain("none"), ["--steps=0"])
    assert not running.KEPT.exists()


@pytest.mark.parametrize(
    "name", sorted({"fp16", *(each.method for each in eden.TRAININGS + transformer.TRAININGS)})
)
def test_the_examples_know_every_method(name: str) -> None:
    training = running.import_example("training")
    compression, *others = running.method_options(name)[1:]
    options = {option.split("=")[0] for option in others}
    assert options <= {"--" + known.replace("_", "-") for known in training.METHOD_OPTIONS[compression]}


@pytest.mark.extended
def test_steps_between_hosts() -> None:
    reason = running.why_no_lab()
    if reason:
        pytest.skip(f"LEFT OUT, because no lab of several hosts can be made here: {reason}")
    (settings,) = binsgdm.SIZES["tiny"].clusters
    figures = steps.measure(settings)
    assert figures["workers"] == 4
    for method in settings.methods:
        assert steps.seconds(figures, method) > 0
        assert len(figures["results"][method]["seconds"]) == settings.rounds
    # Every second worker has its neighbour in the ring on another host.
    assert steps.link_bytes(figures, "none") > 2 * 3 / 4 * 4 * figures["elements"]
    assert steps.link_bytes(figures, "binsgdm") < 0.5 * steps.link_bytes(figures, "none")
    assert steps.link_bytes(figures, binsgdm.HIERARCHICAL) >= binsgdm.predicted({"hosts": 2, **figures})


def figures(validation_loss: float, speed_up: float, bytes_ratio: float = 1.0) -> dict[str, Any]:
    """Made up: those of all methods but float32."""
    training = {
        "losses": [[3.0, 2.0]],
        "seconds": [1.0],
        "bytes_per_step": 1.0,
        "float32_bytes_per_step": 8.0,
    }
    trainings = {
        each.key: {**training, "validation_losses": [2.0 if each.key == "none" else validation_loss]}
        for each in transformer.TRAININGS
    }
    names = {"none": 1.0, binsgdm.ALONE: 0.1}
    speed = {
        "elements": 8000, "workers": 4, "results": {
            method: {
                "seconds": [names.get(method, 1 / speed_up)], "link_bytes": [1000.0 * bytes_ratio], "sent_bytes": 1.0
            }
            for method in (*binsgdm.METHODS, binsgdm.ALONE, "fp16", binsgdm.HIERARCHICAL)
        },
    }  # fmt: skip
    return {
        "trainings": trainings,
        "entropies": {"nothing": 3.0, "one character": 2.5},
        "speeds": {"100mbit": speed},
        "no_lab": None,
        "gpu": "a GPU",
        "clusters": [{"hosts": 2, **speed}],
    }


@pytest.mark.parametrize("module", [transformer, binsgdm, transformer_gpu])
def test_verdicts_come_out_either_way(module: Any, tmp_path: Path) -> None:
    good, bad = figures(2.01, 2.08, 1.04), figures(2.03, 0.9, 0.9)
    assert all(verdict.holds for verdict in module.verdicts(good))
    assert not any(verdict.holds for verdict in module.verdicts(bad))
    shown = {binsgdm: "2.08", transformer_gpu: "a GPU", transformer: "+0.50%"}[module]
    assert shown in module.tables(good)
    for plot in module.draw(good, tmp_path):
        assert (tmp_path / plot.file).stat().st_size < 150_000


def test_says_so_where_there_is_no_lab(tmp_path: Path) -> None:
    without = {**figures(2.01, 2.08), "speeds": {}, "clusters": [], "no_lab": "root is needed"}
    assert "was not measured, because no lab of several hosts can be made: root is needed" in binsgdm.tables(
        without
    )
    assert not any("Gbit/s" in verdict.statement for verdict in binsgdm.verdicts(without))
    assert len(binsgdm.draw(without, tmp_path)) == 1


@pytest.mark.parametrize("gpu", [False, True])
def test_trains_on_a_gpu_where_there_is_one(
    gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched: dict[str, Any] = {}

    def trained(settings: Any, each: transformer.Training, options: Any) -> Any:
        launched[each.method] = options
        return {**figures(2.01, 1.0)["trainings"]["none"], "validation_losses": [2.0, 2.0]}

    monkeypatch.setattr(transformer, "trained", trained)
    monkeypatch.setattr(transformer_gpu, "gpu_problem", lambda: None if gpu else "there is none")
    monkeypatch.setattr(transformer_gpu, "gpu_name", lambda device: "a GPU" if device == "cuda" else None)
    found = transformer_gpu.study(transformer_gpu.SIZES["tiny"])
    device = "--device=cuda" if gpu else "--device=cpu"
    assert launched["none"] == (device, "--lr=0.0006")
    assert launched["binsgdm"] == (device, "--lr=0.0005")
    assert ("Trained on a GPU" if gpu else "No GPU was used") in transformer_gpu.tables(found)
    assert len(transformer_gpu.verdicts(found)) == sum(each.recommended for each in transformer.TRAININGS)


def test_the_full_size_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_gpu, "gpu_problem", lambda: "there is none")
    assert transformer_gpu.problem("full") == "there is none"
    assert transformer_gpu.problem("tiny") is None


def test_rates_are_written_out() -> None:
    assert transformer.rate_title("100mbit") == "100 Mbit/s"
    assert transformer.rate_title("2.5gbit") == "2.5 Gbit/s"


@pytest.mark.parametrize(
    ("method", "changes", "title"),
    [
        ("none", {}, "float32"),
        ("qsgdinf-4", {"bucket_size": 256}, "QSGD(bits=4)"),
        ("qsgd-4", {}, "QSGD(bits=4, norm='l2', bucket_size=1024)"),
        ("nuqsgd-4", {}, "NUQSGD(bits=4)"),
        ("eden-3", {}, "EDEN(bits=3, server_bits=3)"),
        ("eden-3", {"server_bits": 4}, "EDEN(bits=3)"),
        ("binsgdm", {}, "BinSGDM()"),
    ],
)
def test_a_title_has_the_arguments_that_differ_from_the_defaults(
    method: str, changes: dict[str, Any], title: str
) -> None:
    """4 workers: an allgather is the default of QSGD."""
    assert common.title(method, **changes) == title


def test_a_title_has_an_argument_that_matters_to_one_number_of_workers() -> None:
    assert common.title("qsgdinf-4", workers=(4, 16)).endswith("exchange='allgather')")
    assert common.title("qsgdinf-alltoall-4", workers=(4, 16)).endswith("exchange='alltoall')")
