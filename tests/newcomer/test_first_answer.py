"""The README's first screen: does it pay? It agrees with `advise`, and a clone answers within minutes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import advise_tables  # noqa: E402

from horovod_quant.analysis import advice, pays  # noqa: E402
from horovod_quant.analysis.accelerators import on_accelerators  # noqa: E402
from horovod_quant.analysis.cost_model import NONE, Setting  # noqa: E402
from horovod_quant.analysis.fabrics import ACCELERATORS, GIGABIT  # noqa: E402
from horovod_quant.analysis.models import MODELS  # noqa: E402
from horovod_quant.analysis.network import Network  # noqa: E402
from horovod_quant.analysis.recommendation import best_of  # noqa: E402
from horovod_quant.cli.main import main  # noqa: E402
from horovod_quant.frontends import methods  # noqa: E402
from horovod_quant.frontends.methods import FP16  # noqa: E402

README = (ROOT / "README.md").read_text()
WORDS = " ".join(README.split())
NAMED = {
    1: re.findall(r"`(\w+\([^`]+\))` is `EDEN\(\)`\. .* up to 1 Gbit/s `EDEN\(\)`\.", WORDS),
    10: re.findall(r"At about 10 Gbit/s `(\w+\([^`]+\))`", WORDS),
}
"""Which code the README names for BERT-base over Gloo, by Gbit/s."""

AS_GOOD = {4: 0.95, 16: 0.95, 64: 0.95}
"""What the README names must have this share of the gain of what `advise` recommends, by number of workers."""


def over_gloo(model: str, rate: int, workers: int) -> Setting:
    network = Network(workers, 1, rate * GIGABIT)
    return Setting(MODELS[model], network, advise_tables.kernel_speeds(measure=False))


@pytest.mark.parametrize("workers", AS_GOOD)
@pytest.mark.parametrize("rate", NAMED)
def test_the_readme_and_advise_agree(rate: int, workers: int) -> None:
    (code,) = NAMED[rate]
    where, step = over_gloo("bert-base", rate, workers), advise_tables.STEPS["bert-base"]
    rows = [advice.row_of(choice, where, step) for choice in advice.considered(where)]
    best = best_of(rows)
    (choice,) = [
        advice.choice_of(method)
        for family in methods.every_family()
        for method in family
        if method.code() == f"hvq.{code}"
    ]
    own = advice.row_of(choice, where, step)
    assert best.name != NONE
    assert best.gain is not None
    assert own.gain is not None
    assert own.nmse is not None
    assert own.nmse <= advice.MOST_NMSE
    assert own.gain >= AS_GOOD[workers] * best.gain
    if (rate, workers) == (10, 4):
        assert best.name == "global-qsgd-8"
        assert f"(with 4 hosts `GlobalQSGD()` is {best.gain / own.gain - 1:.0%} faster)" in WORDS


def test_for_resnet_50_the_readme_says_usually_none_at_10_gbits() -> None:
    assert re.search(r"At about 10 Gbit/s `[^;]*; for ResNet-50 usually no compression", WORDS)
    recommended = []
    for workers in (4, 16, 64):
        where, step = over_gloo("resnet50", 10, workers), advise_tables.STEPS["resnet50"]
        rows = [advice.row_of(choice, where, step) for choice in advice.considered(where)]
        recommended.append(best_of(rows).name)
    assert 2 * recommended.count(NONE) > len(recommended)


@pytest.mark.parametrize("command", ["scripts/demo", "scripts/test", "horovod-quant advise"])
def test_the_first_screen_has_the_first_commands(command: str) -> None:
    assert any(line.startswith(command) for line in README.splitlines()[:40])


def test_the_table_is_the_models_and_every_cell_says_modelled() -> None:
    assert advise_tables.pays_table() in advise_tables.PAYS.read_text()
    assert advise_tables.jobs_table() in advise_tables.PAYS.read_text()
    short = advise_tables.pays_table(pays.HOSTS[:1])
    assert short in README
    cells = [cell for line in short.splitlines()[2:] for cell in line.strip("| ").split(" | ")[1:]]
    assert len(cells) == len(pays.JOBS) * len(pays.GIGABITS)
    assert all(cell.endswith(", modelled") for cell in cells)
    assert any("does not pay" in cell for cell in cells)


def test_what_the_readme_says_of_16_hosts_is_the_models() -> None:
    few, more = (_cells(hosts) for hosts in (8, 16))
    assert len(few) == len(more) == len(pays.JOBS) * len(pays.GIGABITS)
    assert "With 16 hosts one cell names another method: " in WORDS
    (limit,) = re.findall(r"The other speed-ups change by at most ([\d.]+)\. ", WORDS)
    assert all(abs(speed_up - before) < float(limit) + 0.01 for (before, _), (speed_up, _) in zip(few, more))
    (changed,) = (number for number, (one, other) in enumerate(zip(few, more)) if one[1] != other[1])
    model, gigabits = divmod(changed, len(pays.GIGABITS))
    assert (model, pays.GIGABITS[gigabits]) == (0, 10)
    network = Network(16, 1, 10 * GIGABIT, pays.LATENCY)
    where = on_accelerators(MODELS["resnet50"], network, ACCELERATORS[pays.ACCELERATOR])
    rows = [advice.row_of(each, where, pays.JOBS["resnet50"].step) for each in advice.considered(where)]
    best = best_of(rows)
    (fp16,) = (row for row in rows if row.name == FP16)
    assert best.choice.code.removeprefix("hvq.") == more[changed][1]
    assert (
        f"for ResNet-50 at 10 Gbit/s `{more[changed][1]}` is predicted at {best.gain:.2f}x and fp16 at "
        f"{fp16.gain:.2f}x, too close to call"
    ) in WORDS


def _cells(hosts: int) -> list[tuple[float, str]]:
    """Speed-up and method of each cell with this number of hosts."""
    cells = re.findall(
        r"\| (?:([\d.]+)x with ([^|]*?)|does not pay), modelled(?= \|)", advise_tables.pays_table((hosts,))
    )
    return [(float(speed_up or 1), code) for speed_up, code in cells]


def test_the_readmes_first_command_gives_the_tables_answer(capsys: pytest.CaptureFixture) -> None:
    (command,) = re.findall(
        r"^horovod-quant (advise .*?) *(?:#.*)?$", README.partition("## Which method?")[0], re.M
    )
    assert main(command.split()) == 0
    gain = re.search(r"^Faster: +([\d.]+)x faster", capsys.readouterr().out, re.M)
    assert gain is not None
    row = next(line for line in README.splitlines() if line.startswith("| BERT-base, 8 hosts"))
    of_table = float(row.split("|")[2 + pays.GIGABITS.index(10)].partition("x")[0])
    assert float(gain[1]) == pytest.approx(of_table, abs=0.06)


@pytest.mark.extended
def test_from_clone_to_answer() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(ROOT / "scripts" / "first-answer")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "from clone to answer in " in done.stdout
