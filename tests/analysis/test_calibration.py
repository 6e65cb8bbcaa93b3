"""Calibration: files are read or refused, and what made the measurements is found again."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from modelling import SPEEDS

from horovod_quant.analysis.calibration import Bench, calibrate, observe, predict, read_bench
from horovod_quant.analysis.models import MODELS
from horovod_quant.analysis.network import DDP_SOFTWARE, Network, Software

LINKS = Network(1, bandwidth=math.inf, latency=1e-4)
METHODS = ["none", "fp16", "global-qsgd-8", "global-qsgd-4", "qsgd-8", "qsgd-4", "nuqsgd-4", "binsgdm"]


def bench(workers: int, measured: dict[str, float] | None = None) -> Bench:
    shapes = MODELS["resnet50"]
    return Bench(shapes, workers, workers, 1, "gloo", 2, 2**25, measured or dict.fromkeys(METHODS, 1.0))


def observations(software: Software):
    """What the model says of a lab with this software, as if measured."""
    for workers in (2, 4):
        for bandwidth in (math.inf, 125e6):
            asked = observe(bench(workers), dataclasses.replace(LINKS, bandwidth=bandwidth), one_machine=True)
            measured = predict(asked, SPEEDS, software)
            yield asked._replace(bench=bench(workers, measured))


def test_software_is_found_again() -> None:
    true = dataclasses.replace(Software(), overhead=4e-3, gradient=5e-4, stream=8e-10, half_sum=3e-8)
    made = list(observations(true))
    found = calibrate(made, SPEEDS)
    for observation in made:
        for name, seconds in predict(observation, SPEEDS, found).items():
            assert seconds == pytest.approx(observation.bench.measured[name], rel=0.1)
    assert found.half_sum == pytest.approx(true.half_sum, rel=0.4)


def test_what_a_bench_says_nothing_about_stays() -> None:
    alone = observe(bench(2, {"none": 0.5}), LINKS)
    found = calibrate([alone], SPEEDS)
    for name in ("gradient", "half_sum", "kernels", "allgather", "alltoall"):
        assert getattr(found, name) == pytest.approx(getattr(Software(), name))
    assert predict(alone, SPEEDS, found)["none"] > 2 * predict(alone, SPEEDS, Software())["none"]


def test_cores_of_a_lab_are_shared_by_all_hosts() -> None:
    assert observe(bench(4), LINKS, one_machine=True).network.cores_per_worker == 0.5
    assert observe(bench(4), LINKS).network.cores_per_worker == 2


# ---- files ----------------------------------------------------------------------------------------------------------

WRITTEN = {
    "version": 1, "framework": "torch", "model": None, "shapes": {"a": [1000, 3], "b": [7]}, "workers": 4, "hosts": 2,
    "workers_per_host": 2, "controller": "mpi", "cores": 8, "group_bytes": 1000, "interrupted": False,
    "results": [{"method": "none", "wall_seconds": [0.3, 0.1, 0.2]}, {"method": "qsgd-4", "wall_seconds": [0.5]}],
}  # fmt: skip


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(WRITTEN))
    found = read_bench(path)
    shapes = {"a": (1000, 3), "b": (7,)}
    spelled = "qsgd-4-l2-bucket1024-allgather"  # what qsgd-4 meant in files of version 1
    assert found == Bench(shapes, 4, 2, 2, "mpi", 8, 1000, {"none": 0.2, spelled: 0.5})
    path.write_text(json.dumps({**WRITTEN, "version": 2}))
    assert read_bench(path).measured == {"none": 0.2, "qsgd-4": 0.5}


def test_a_file_of_ddp_is_read_without_what_is_not_modelled(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    own = {"method": "powersgd-1", "wall_seconds": [0.1]}
    changes = {"version": 2, "framework": "ddp", "controller": "gloo", "results": [*WRITTEN["results"], own]}
    path.write_text(json.dumps({**WRITTEN, **changes}))
    found = read_bench(path)
    assert (found.controller, found.measured) == ("ddp", {"none": 0.2, "qsgd-4": 0.5})
    observed = observe(found._replace(measured={}), LINKS)
    fitted = vars(calibrate([observed], SPEEDS))
    assert fitted == pytest.approx(vars(DDP_SOFTWARE)), "nothing measured: the default"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version 3; this program reads versions 1 and 2"),
        ({"framework": "tensorflow"}, "measured with tensorflow"),
        ({"controller": "nccl"}, "'nccl' is not one of gloo, mpi"),
        ({"controller": "ddp"}, "'ddp' is not one of gloo, mpi"),
        ({"hosts": 3}, "3 hosts of 2 are not 4 workers"),
        ({"workers": 1, "hosts": 1, "workers_per_host": 1}, "one worker sends nothing"),
        ({"results": []}, "contains no measurement"),
        ({"results": [{"method": "qsgd"}]}, "not a file that horovod-quant bench"),
        ({"results": [{"method": "zip-4", "wall_seconds": [1.0]}]}, "no method 'zip-4'"),
        ({"results": [{"method": "none", "wall_seconds": [0.0]}]}, "none takes 0.0 seconds"),
        ({"shapes": None}, "not a file that horovod-quant bench"),
        ({"shapes": {"a": ["many"]}}, "a: use sizes that are integers"),
        ({"workers": "4"}, "workers='4': use an integer from 1"),
        (
            {"workers": 10**9, "hosts": 10**9, "workers_per_host": 1},
            "workers=1000000000: use an integer from 1",
        ),
        ({"cores": 0}, "cores=0: use an integer from 1"),
        ({"results": [{"method": "none", "wall_seconds": "long"}]}, "wall_seconds='l': use a number from 0"),
        ({"results": [{"method": "none", "wall_seconds": [math.inf]}]}, "wall_seconds=inf: use a number"),
    ],
)
def test_files_that_help_nothing_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({**WRITTEN, **change}))
    with pytest.raises(ValueError, match=message):
        read_bench(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe", b'{"version": 1}'])
def test_files_of_another_kind_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bench.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a file that horovod-quant bench"):
        read_bench(path)
