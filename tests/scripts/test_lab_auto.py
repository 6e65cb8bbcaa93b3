"""The table and verdicts that scripts/lab-auto makes of what it has measured, and where scripts write tables."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_quant.autotune.trial import Measurement, Report

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import lab_auto  # noqa: E402
import pages  # noqa: E402

MEASUREMENTS = (Measurement("none", 0.0, 1.0, 2.0, 2.0), Measurement("eden-3", 0.03, 0.5, 1.0, 1.0))
PAGE = "Before\n<!-- table: scripts/lab-auto -->\nold\n<!-- /table -->\nafter\n"


def measured(folder: Path, cell: str, taken: str, **seconds: float) -> None:
    results = [
        {"method": name.replace("_", "-"), "wall_seconds": [noise * each for noise in (1, 2, 0.9)]}
        for name, each in seconds.items()
    ]
    (folder / f"{cell}.json").write_text(json.dumps({"results": results, "auto": {"method": taken}}))


def test_it_compares_auto_with_the_fastest(tmp_path: Path) -> None:
    measured(tmp_path, "mpi-2-100mbit", "eden-3", none=1.0, auto=0.41, eden_3=0.4, qsgdinf_4=0.5)
    measured(tmp_path, "gloo-4-none", "none", none=0.1, auto=0.104, eden_3=0.2)
    assert list(lab_auto.verdicts(tmp_path)) == [
        (False, "gloo, 4 hosts, none: took none, +4.0% of the time of none (100 ms; none 100)"),
        (True, "mpi, 2 hosts, 100mbit: took eden-3, +2.5% of the time of eden-3 (400 ms; none 1,000)"),
    ]
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    (tmp_path / "load").write_text("0.25 (a processor)\n")
    assert lab_auto.main(tmp_path, page) == 1
    assert page.read_text().splitlines()[1:-1] == [
        "<!-- table: scripts/lab-auto -->",
        "",
        "| limit | | hosts | `none`, ms | fastest, ms | Auto took | ms | against the fastest |",
        "| --- | --- | ---: | ---: | --- | --- | ---: | ---: |",
        "| none | Gloo | 4 | 100 | none, 100 | none | 104 | +4.0% |",
        "| 100 Mbit/s | MPI | 2 | 1,000 | eden-3, 400 | eden-3 | 410 | +2.5% |",
        "",
        "Load of the machine before the measurements: 0.25 (a processor).",
        "",
        "<!-- /table -->",
    ]


def test_it_tells_what_was_taken_while_the_rate_fell(tmp_path: Path) -> None:
    measured(tmp_path, "gloo-4-none", "none", none=0.1, auto=0.1)
    for last, reached in (("eden-3", True), ("none", False)):
        reports = [Report(method, MEASUREMENTS, 4, 28, 28) for method in ("none", last)]
        (tmp_path / "watched").write_text("".join(f"after 80 s auto {report}\n" for report in reports))
        assert list(lab_auto.verdicts(tmp_path))[1:] == [
            (reached, f"a rate that falls to 100mbit: took none, {last}")
        ]
        assert lab_auto.table(tmp_path).endswith(f"with `again_after=20`, Auto took none, {last}.")


def test_nothing_measured_is_nothing_reached(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert lab_auto.main(tmp_path, page) == 1
    assert page.read_text() == PAGE


@pytest.mark.parametrize("page", ["", PAGE + PAGE, PAGE.replace("<!-- /table -->", "")])
def test_a_page_without_its_place_is_refused(page: str) -> None:
    with pytest.raises(SystemExit, match=r"<!-- table: scripts/lab-auto --> and <!-- /table --> once each"):
        pages.insert(page, "table", "lab-auto", "new")


def test_the_rate_falls_after_the_first_trial_of_this_run(tmp_path: Path) -> None:
    """A run that was aborted left a log with that trial."""
    text = (ROOT / "scripts" / "lab-auto").read_text()
    watch = text[text.index("watch() {") : text.index("\nscripts/setup")]
    lab = tmp_path / "scripts" / "lab"
    lab.parent.mkdir()
    lab.write_text("#!/bin/sh\necho $2 > rate\n")
    lab.chmod(0o755)
    line = f"after 12 s auto {Report('none', MEASUREMENTS, 4, 28, 28)}"
    (tmp_path / "watched.partial").write_text(f"{line}\n")
    # `tee` empties the log when it starts: it waits until the loop has looked at the log.
    script = f"""
        set -euo pipefail
        RESULTS=.
        die() {{ echo "$*" >&2; exit 1; }}
        sleep() {{ touch looked; command sleep 0.1; }}
        in_lab() {{ cat rate; echo "{line}"; }}
        tee() {{ until [ -e looked ] || [ "$(cat rate)" != none ]; do command sleep 0.1; done; command tee "$@"; }}
        {watch}
        watch"""
    subprocess.run([str(shutil.which("bash")), "-c", script], cwd=tmp_path, timeout=60, check=True)
    assert (tmp_path / "looked").exists(), "the rate fell before the program ran"
    assert (tmp_path / "watched").read_text() == f"none\n{line}\n"
    assert (tmp_path / "rate").read_text() == "100mbit\n"
