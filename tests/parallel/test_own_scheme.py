"""A scheme of somebody else's, in a file outside of the package, is as good as the package's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import extended
from launching import BIN, ROOT, environment, horovodrun

pytestmark = pytest.mark.parallel

SCHEME = '''"""TernGrad (Wen et al., NeurIPS 2017): -1, 0 or 1, times the largest magnitude of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from horovod_quant.kernels.arrays import no_part
from horovod_quant.kernels.layout import buckets, code_words
from horovod_quant.schemes.base import (
    Allgather, Collective, Decoded, Exchange, Gradient, Scheme, Workers, require_bucket_size, split_points, validated,
)


@dataclass(frozen=True)
class TernGrad(Scheme):
    """Ternary codes on each worker's own scale.

    Args:
        bucket_size: elements that share a scale, a multiple of 32.
    """

    bucket_size: int = 1024

    unbiased = True

    def __post_init__(self) -> None:
        require_bucket_size(self.bucket_size)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return (Collective(Allgather, "int32"),)

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        scale_at = split_points([buckets(g.elements, self.bucket_size) for g in gradients])
        code_at = split_points([code_words(g.elements, 2) for g in gradients])
        scales: list[Any] = []

        def measure(g: Gradient, out: Any) -> Any:
            scales.append(kernels.bucket_maxima(g.values, self.bucket_size, out))
            return scales[-1]

        def encode(i: int, out: Any) -> Any:
            g = gradients[i]
            key = g.keys.key("worker", g.step, workers.rank)
            return kernels.encode_uniform_codes(g.values, scales[i], self.bucket_size, 2, key, g.start, out)

        parts: list[Any] = []
        for i, g in enumerate(gradients):
            parts.append((scale_at[i + 1] - scale_at[i], np.float32, partial(measure, g)))
        for i in range(len(gradients)):
            parts.append((code_at[i + 1] - code_at[i], np.int32, partial(encode, i)))
        payload = kernels.pack([*parts, no_part(np.int32)])
        words = np.diff(scale_at) + np.diff(code_at)
        sizes = [4 * int(count) for count in words]
        lengths = None if scale_at[-1] else [0] * workers.size
        pieces = yield from validated(Allgather(payload, sizes, lengths), workers)

        def write(i: int, factor: float, out: Any) -> Any:
            own_scales = [kernels.view(p[scale_at[i] : scale_at[i + 1]], np.float32) for p in pieces]
            codes = [p[scale_at[-1] + code_at[i] : scale_at[-1] + code_at[i + 1]] for p in pieces]
            return kernels.decode_uniform_codes(codes, own_scales, self.bucket_size, 2, factor, out)

        return Decoded(workers.size, write)


@dataclass(frozen=True)
class CallsNumpy(TernGrad):
    """The same bits, by way of numpy."""

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        copies = [g.replaced(np.array([x for x in g.values], g.values.dtype)) for g in gradients]
        assert [len(g.values) for g in copies] == [g.elements for g in gradients]
        return (yield from super().begin(copies, workers, kernels))


@dataclass(frozen=True)
class OnTheHost(CallsNumpy):
    """It says so."""

    host_only = True
'''

FILES = {
    "own_terngrad.py": SCHEME,
    "own_terngrad-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: own-terngrad\nVersion: 1.0\n",
    "own_terngrad-1.0.dist-info/entry_points.txt": "[horovod_quant.schemes]\nterngrad = own_terngrad:TernGrad\n",
}

WORKER = Path(__file__).with_name("own_scheme_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package of the scheme is installed."""
    found = tmp_path_factory.mktemp("installed")
    for name, text in FILES.items():
        (found / name).parent.mkdir(exist_ok=True)
        (found / name).write_text(text)
    return found


def with_scheme(folder: Path) -> dict[str, str]:
    places = [str(folder), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, places))}


def command(folder: Path, *words: Any) -> str:
    """What a command of the package prints."""
    done = subprocess.run(
        [sys.executable, "-m", "horovod_quant", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300, env=environment(with_scheme(folder)), stdin=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("controller", "workers", "framework"),
    [("gloo", 2, "torch"), extended("mpi", 4, "torch"), ("gloo", 2, "tensorflow")],
)
def test_it_trains_with_the_simulators_bits(
    controller: str, workers: int, framework: str, folder: Path
) -> None:
    done = horovodrun(controller, workers, [sys.executable, WORKER, framework], env=with_scheme(folder))
    assert done.returncode == 0, done.stdout[-5000:]
    assert done.stdout.count("FINISHED") == workers, done.stdout[-3000:]


def test_it_runs_over_mpi4py(folder: Path) -> None:
    mpirun = shutil.which("mpirun", path=os.pathsep.join([str(BIN), os.environ["PATH"]]))
    assert mpirun
    done = subprocess.run(
        [mpirun, "-np", "3", "--oversubscribe", "--bind-to", "none", sys.executable, str(WORKER), "mpi"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, env=environment(with_scheme(folder)),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("FINISHED") == 3


@pytest.mark.extended
def test_bench_measures_it(folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    bench = [
        sys.executable,
        "-m",
        "horovod_quant",
        "bench",
        "--framework",
        "torch",
        "--shapes",
        "100x100",
        "64",
    ]
    bench += ["--rounds", "1", "--methods", "terngrad", "--json", str(report)]
    done = horovodrun("gloo", 2, bench, env=with_scheme(folder))
    assert done.returncode == 0, done.stdout
    found = {result["method"]: result for result in json.loads(report.read_text())["results"]}
    assert list(found) == ["none", "fp16", "terngrad"]
    assert 0.25 < found["terngrad"]["nmse"] < 9
    assert found["terngrad"]["bytes_sent"] < found["none"]["bytes_sent"] / 8


def test_advise_says_nothing_false_of_it(folder: Path) -> None:
    here = [
        "advise",
        "--model",
        "tiny",
        "--workers",
        4,
        "--hosts",
        2,
        "--bandwidth",
        "10mbit",
        "--step",
        "10ms",
    ]
    printed = command(folder, *here, "--methods", "terngrad", "--verbose")
    rows = [line.split() for line in printed.splitlines() if line.startswith("terngrad ")]
    assert len(rows) == 2, printed
    assert "Faster:  no method is meaningfully faster\nWhy:     terngrad" in printed
    assert "but its scheme does not state its nmse" in printed
    assert "optimizer" not in printed
    assert "What TernGrad may compute without this package's kernels is not counted." in printed


def test_doctor_lists_it(folder: Path) -> None:
    printed = command(folder, "doctor", "--framework", "torch", "--model", "tiny")
    assert "schemes of other packages: TernGrad of own_terngrad" in printed
