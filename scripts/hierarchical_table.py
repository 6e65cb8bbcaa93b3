"""Write what ``horovod-quant advise`` predicts for 8 hosts into a page.

The hosts have 8 GPUs each; the table stands between markers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pages import insert

RATES = ["10gbit", "25gbit", "100gbit"]
METHODS = ["none", "fp16", "global-qsgd-8", "qsgd-4", "qsgd-4-allgather", "binsgdm"]
SETTING = ["--model", "bert-base", "--step", "0.35", "--backward", "0.23", "--accelerator", "--workers", "64",
           "--hosts", "8", "--local-bandwidth", "100gbit"]  # fmt: skip
COMMAND = Path(sys.executable).with_name("horovod-quant")


def predicted(rate: str) -> dict[str, dict[str, Any]]:
    """Return the results of each method with links of a rate.

    Of hierarchical ones also with 8 bits inside a host.
    """
    found: dict[str, dict[str, Any]] = {}
    by_8_bits = {result["method"]: result for result in advised(rate, "--inside", "8")}
    for result in advised(rate):
        method = result["method"]
        found[method] = result
        if method.endswith("hierarchical"):
            found[f"{method}, inside=8"] = by_8_bits[method]
    return found


def advised(rate: str, *more: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(COMMAND), "advise", *SETTING, "--bandwidth", rate, "--methods", *METHODS, *more, "--json", "-"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)["results"]


def table() -> str:
    found = {rate: predicted(rate) for rate in RATES}
    heads = [f"ms per step, {rate.removesuffix('gbit')} Gbit/s" for rate in RATES]
    lines = ["| method | nmse | MB sent by a worker | MB leaving a host | " + " | ".join(heads) + " |"]
    lines.append("| --- | ---: | ---: | ---: |" + " ---: |" * len(RATES))
    for method, result in found[RATES[0]].items():
        nmse = result["nmse"]
        cells = [method, "" if nmse is None else f"{nmse:.2g}"]
        cells += [f"{result[which] / 1e6:,.0f}" for which in ("bytes_sent", "host_bytes_sent")]
        cells += [f"{1e3 * found[rate][method]['step_seconds']:,.0f}" for rate in RATES]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(page: Path) -> None:
    page.write_text(insert(page.read_text(), "table", "hierarchical-table", table()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
