"""scripts/demonstration.py: the table, the plot and the figures of a small run, and what a failed run says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from parallel.launching import ROOT, environment

from horovod_quant.frontends import former_names

pytestmark = pytest.mark.parallel


def demonstration(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demonstration.py"), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), timeout=600,
    )  # fmt: skip


@pytest.mark.extended
def test_shows_table_plot_and_figures(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    done = demonstration(
        *(
            "--only",
            "binsgdm",
            "--workers",
            "2",
            "--epochs",
            "2",
            "--seeds",
            "0",
            "7",
            "--output",
            str(folder),
        )
    )
    assert done.returncode == 0, done.stdout
    assert "Handwritten digits, 2 workers, Gloo, 2 seeds" in done.stdout
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["version"] == former_names.VERSION
    (row,) = figures["rows"]
    assert len(row["accuracies"]) == 2
    assert f"{sum(row['accuracies']) / 2:.2%}" in done.stdout
    assert f"{row['bytes_per_step']:,.0f}" in done.stdout
    assert row["bytes_sent"][-1] == pytest.approx(row["bytes_per_step"] * 20)
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_the_first_rows_come_without_all(capsys: pytest.CaptureFixture) -> None:
    """None, fp16, GlobalQSGD, EDEN and BinSGDM; the others follow with --all."""
    sys.path.append(str(ROOT / "scripts"))
    pytest.importorskip("matplotlib")
    import demonstration

    def chosen(*options: str) -> list[str]:
        return [c.key for c in demonstration.choose(demonstration.make_parser().parse_args(options))]

    assert chosen() == ["sgd", "fp16", "global-qsgd-8", "eden-3", "binsgdm"]
    assert chosen("--all")[:5] == chosen()
    assert sorted(chosen("--all")) == sorted(c.key for c in demonstration.CONFIGURATIONS)


@pytest.mark.extended
def test_a_row_is_shown_before_the_next_is_trained(tmp_path: Path) -> None:
    """The program is still running when the first row comes."""
    options = [
        "--only",
        "sgd",
        "fp16",
        "--workers",
        "1",
        "--epochs",
        "1",
        "--seeds",
        "0",
        "--output",
        str(tmp_path),
    ]
    with subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "scripts" / "demonstration.py"), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
    ) as running:  # fmt: skip
        assert running.stdout is not None
        shown = next(line for line in running.stdout if line.startswith("float32, SGD"))
        assert running.poll() is None, "the next training is still to come"
        rest = running.communicate(timeout=600)[0]
    assert "%" in shown
    assert "float16, SGD" in rest


@pytest.mark.extended
def test_a_failed_training_is_shown_and_fails(tmp_path: Path) -> None:
    done = demonstration("--only", "sgd", "--workers", "1", "--epochs", "0", "--output", str(tmp_path))
    assert done.returncode == 1
    assert "float32, SGD: " in done.stdout
    assert "torch_digits.py: error: --epochs 0: use at least 1" in done.stdout
    assert 'torch_digits.py", line' not in done.stdout, "a traceback of the example"
