"""All commands: an output that takes nothing more, files that are written whole or not at all, bad numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "parallel"))

from launching import environment  # noqa: E402

from horovod_quant.cli.main import main  # noqa: E402
from horovod_quant.cli.problem import Problem, check_file, write_file  # noqa: E402

COMMAND = Path(sys.executable).with_name("horovod-quant")
TIMEOUT = 300

ADVISE = [
    "advise",
    "--model",
    "resnet50",
    "--workers",
    "4",
    "--bandwidth",
    "1gbit",
    "--step",
    "1",
    "--methods",
    "fp16",
]
COMMANDS = [
    ADVISE,
    [*ADVISE, "--json", "-"],
    ["doctor", "--model", "resnet50", "--framework", "torch"],
    ["bench", "--help"],
]
every_command = pytest.mark.parametrize("command", COMMANDS, ids=["advise", "json", "doctor", "help"])


def run(command: Sequence[str], redirection: str, **variables: str) -> subprocess.CompletedProcess[str]:
    line = f'"$@" {redirection}; echo status $? >&3'
    return subprocess.run(
        ["sh", "-c", f"{{ {line}; }} 3>&1", "sh", str(COMMAND), *command],
        capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL,
        env=environment({"PYTHONUNBUFFERED": "", **variables}),
    )  # fmt: skip


@every_command
@pytest.mark.parametrize(
    ("redirection", "reason"), [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
)
def test_a_lost_output_is_an_error_of_one_line(command: Sequence[str], redirection: str, reason: str) -> None:
    done = run(command, redirection)
    assert done.stdout == "status 1\n"
    assert done.stderr == f"horovod-quant: standard output: {reason}\n"


@every_command
def test_a_reader_may_leave_early(command: Sequence[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [str(COMMAND), *command], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT,
        stdin=subprocess.DEVNULL, env=environment({"PYTHONUNBUFFERED": ""}),
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_lost_output_costs_no_file(tmp_path: Path) -> None:
    done = run([*ADVISE, "--json", str(tmp_path / "advice.json")], ">/dev/full", PYTHONUNBUFFERED="1")
    assert done.stdout == "status 1\n"
    assert done.stderr.count("\n") == 1
    assert json.loads((tmp_path / "advice.json").read_text())["model"] == "resnet50"


def test_nothing_is_lost_without_an_input_or_a_place_for_errors() -> None:
    done = run(ADVISE, "2>&- <&-")
    assert done.stdout.startswith("Write: ")
    assert done.stdout.endswith("status 0\n")


@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "0", "1e300"])
def test_a_time_limit_is_a_time(timeout: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", f"--timeout={timeout}"]) == 2
    err = capsys.readouterr().err
    assert err == f"horovod-quant doctor: --timeout={float(timeout)!r}: use a number from 1 to 1e+06\n"


@pytest.mark.parametrize("command", ["doctor", "bench"])
def test_a_rank_is_a_number(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "first")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    assert main([command]) == 2
    assert capsys.readouterr().err.startswith(f"horovod-quant {command}: HOROVOD_RANK='first': ")


@pytest.mark.parametrize("command", [ADVISE, ["bench", "--framework", "torch"]])
def test_kernels_that_there_are_not(
    command: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("HOROVOD_QUANT_KERNELS", "magic")
    assert main(command) == 2
    assert "HOROVOD_QUANT_KERNELS=magic: no such backend" in capsys.readouterr().err


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_trial_leaves_what_is_there(tmp_path: Path) -> None:
    old, link = tmp_path / "old", tmp_path / "link"
    old.write_text("what was there")
    link.symlink_to(tmp_path / "new")
    for path in (old, link, tmp_path / "other"):
        check_file("--json", str(path))
    assert sorted(os.listdir(tmp_path)) == ["link", "old"]
    assert old.read_text() == "what was there"
    assert link.is_symlink()


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("", tmp_path, f"{tmp_path}/new/", tmp_path / "nowhere" / "new", tmp_path / "file" / "new"):
        with pytest.raises(Problem, match="--json: "):
            check_file("--json", str(path))


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("what was there")
    link.symlink_to(path)
    with pytest.raises(UnicodeEncodeError):
        write_file(str(link), "\ud800")
    assert path.read_text() == "what was there"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]
    write_file(str(link), "new")
    assert path.read_text() == "new"
    assert link.is_symlink()


def test_what_is_no_file_is_written_as_it_is() -> None:
    reader, writer = os.pipe()
    write_file(f"/dev/fd/{writer}", "what there is")
    assert os.read(reader, 100) == b"what there is"
    os.close(reader)
    os.close(writer)
