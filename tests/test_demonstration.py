"""scripts/demonstration.py: the table, the plot and the figures of a small run, and what a failed run says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from parallel.launching import ROOT, environment

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
    (row,) = json.loads((folder / "figures.json").read_text())["rows"]
    assert len(row["accuracies"]) == 2
    assert f"{sum(row['accuracies']) / 2:.2%}" in done.stdout
    assert f"{row['bytes_per_step']:,.0f}" in done.stdout
    assert row["bytes_sent"][-1] == pytest.approx(row["bytes_per_step"] * 20)
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.extended
def test_a_failed_training_is_shown_and_fails(tmp_path: Path) -> None:
    done = demonstration("--only", "sgd", "--workers", "1", "--epochs", "0", "--output", str(tmp_path))
    assert done.returncode == 1
    assert "float32, SGD: " in done.stdout
    assert "torch_digits.py: error: --epochs 0: use at least 1" in done.stdout
    assert 'torch_digits.py", line' not in done.stdout, "a traceback of the example"
