"""``scripts/lab``, and Horovod between its hosts."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import extended
from launching import BIN, ROOT

pytestmark = pytest.mark.parallel

LAB = ROOT / "scripts" / "lab"
NAME = f"test_{hashlib.sha256(bytes(ROOT)).hexdigest()[:8]}"
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
NAMESPACES = ("net", "mnt", "uts", "ipc", "pid")
METHODS = ["qsgd", "global-qsgd", "binsgdm"]  # allgather; allreduce; alltoall and allgather
RUNS = [
    extended("gloo", "host1:1,host2:1"),
    extended("mpi", "host1:1,host2:1"),
    ("gloo", "host1:1,host2:1,host3:1,host4:1"),
    ("mpi", "host1:1,host2:1,host3:1,host4:1"),
    extended("gloo", "host1:2,host2:2"),
]


def lab(*arguments: Any, name: str = NAME, before: tuple[str, ...] = (), **options: Any) -> Any:
    """Runs ``scripts/lab``; its process is that of the command, also for ``exec``."""
    process = subprocess.Popen(
        [*before, str(LAB), *map(str, arguments)], text=True, start_new_session=True,
        stdin=options.pop("stdin", subprocess.DEVNULL), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "LAB": name, "VENV": str(BIN.parent)}, cwd=ROOT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(**options)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0] + "\n[killed, for it took too long]"
    return subprocess.CompletedProcess(arguments, process.returncode, output)


def done(*arguments: Any, **options: Any) -> str:
    """The output of a ``scripts/lab`` that must succeed."""
    completed = lab(*arguments, **options)
    assert completed.returncode == 0, f"scripts/lab {arguments} printed\n{completed.stdout[-5000:]}"
    return completed.stdout


@pytest.fixture(scope="module")
def possible() -> Iterator[None]:
    """Leaves a test out where there can be no lab. Otherwise, one test run of this checkout at a time."""
    check = lab("check")
    if check.returncode:
        pytest.skip(f"LEFT OUT, because no lab of several hosts can be made here: {check.stdout.strip()}")
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_logins_are_scheduled_in_groups_again_after_the_last_lab(possible: None) -> None:
    """It needs a machine without another lab, so it comes before those of this module."""
    if not AUTOGROUP.exists() or Path("/run/horovod-quant-lab").exists():
        pytest.skip("LEFT OUT, because this kernel has no such groups, or another lab is up")
    before = AUTOGROUP.read_text()
    try:
        AUTOGROUP.write_text("1")
    except OSError as error:
        pytest.skip(f"LEFT OUT, because this setting cannot be changed here: {error}")
    names = (NAME, f"{NAME}_second")
    try:
        for name in names:
            done("up", 1, name=name)
            assert AUTOGROUP.read_text() == "0\n"
        AUTOGROUP.write_text("1")  # as an `up` leaves it that was cut off
        done("up", 1, name=names[1])
        assert AUTOGROUP.read_text() == "0\n"
        done("down", name=names[0])
        assert AUTOGROUP.read_text() == "0\n"
        done("down", name=names[1])
        assert AUTOGROUP.read_text() == "1\n"
    finally:
        for name in names:
            lab("down", name=name)
        AUTOGROUP.write_text(before)


@pytest.fixture(scope="module")
def four_hosts(possible: None) -> Iterator[None]:
    done("up", 4, "1gbit")
    yield
    done("down")


def counted(
    folder: Path, controller: str, hosts: str, cycle_time: int, *program: Any
) -> list[dict[str, Any]]:
    """What lab_worker.py found for each method; gradients were right."""
    slots = [(name, int(count)) for name, count in (host.split(":") for host in hosts.split(","))]
    workers = sum(count for _, count in slots)
    # Horovod's workers talk to each other in every cycle, also when idle: let them do it rarely.
    horovodrun = ["env", f"HOROVOD_CYCLE_TIME={cycle_time}", "horovodrun", "-np", workers, "-H", hosts]
    worker = Path(__file__).with_name("lab_worker.py")
    output = done(
        "exec",
        "host1",
        *horovodrun,
        f"--{controller}",
        "python",
        worker,
        folder,
        *program,
        *METHODS,
        timeout=500,
    )
    figures = [json.loads(line) for line in (folder / "figures").read_text().splitlines()]
    print(*figures, sep="\n")
    assert [figure["method"] for figure in figures] == METHODS, output[-3000:]
    for figure in figures:
        assert figure["hosts"] == [name for name, count in slots for _ in range(count)]
        assert not any(figure["wrong"]), f"gradients differ from the simulator's: {figure}"
        assert figure["equal"], f"parameters or gradients differ between ranks: {figure}"
    return figures


@pytest.mark.extended
@pytest.mark.parametrize("hosts", [2, 4])
def test_hierarchical_bytes_between_hosts(hosts: int, four_hosts: None, tmp_path: Path) -> None:
    """They are those of the hosts alone, by the formulas of shared/ALGORITHMS.md, whatever the workers of a host."""
    width, steps = 2048, 4
    elements = width * width
    names = ",".join(f"host{number}:2" for number in range(1, hosts + 1))
    there_and_back = 2 * (hosts - 1) / hosts
    formulas = {
        "qsgd": (hosts - 1) * (4 / 8 + 4 / 1024),
        "global-qsgd": there_and_back * (4 / 4 + 4 / 1024),
        "binsgdm": there_and_back / 8,
    }
    for figure in counted(tmp_path, "gloo", names, 100, "hierarchical", width):
        expected = formulas[figure["method"]] * elements * hosts * steps
        assert figure["link"] == pytest.approx(expected, rel=0.10), figure


@pytest.mark.parametrize(("controller", "hosts"), RUNS)
def test_horovod_between_hosts(controller: str, hosts: str, four_hosts: None, tmp_path: Path) -> None:
    slots = hosts.split(",")
    for figure in counted(tmp_path, controller, hosts, 40, "flat", 1024):
        # Whatever was to be sent has crossed an interface, so nothing has gone through shared memory.
        wire = figure["link"] + figure["loopback"]
        assert wire == pytest.approx(figure["stats"], rel=0.10), figure
        assert wire >= 0.99 * figure["stats"], figure
        if len(figure["hosts"]) == len(slots):
            assert figure["link"] >= 0.99 * figure["stats"], figure
        else:  # every second worker has its neighbour in the ring on another host
            assert figure["link"] >= 0.49 * figure["stats"], figure


def test_hosts_share_no_namespace(four_hosts: None) -> None:
    ours = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES}
    everyone = [ours]
    for host in ("host1", "host2"):
        links = done("exec", host, "readlink", *(f"/proc/self/ns/{kind}" for kind in NAMESPACES)).split()
        everyone.append(dict(zip(NAMESPACES, links)))
        assert done("exec", host, "hostname").strip() == host
        assert not done("exec", host, "ls", "/dev/shm")
    for kind in NAMESPACES:
        assert len({links[kind] for links in everyone}) == len(everyone), (kind, everyone)


@pytest.mark.extended
def test_rate_holds_in_both_directions_and_can_be_changed(four_hosts: None) -> None:
    megabytes, command = 5, ["exec", "host1", "sh", "-c"]
    try:
        for rate, least in (("100mbit", megabytes * 8 / 100), ("40mbit", megabytes * 8 / 40)):
            done("rate", rate)
            assert done("status").split().count(rate) == 8
            for transfer in (f"head -c {megabytes}MB /dev/zero | ssh host2 'cat > /dev/null'",
                             f"ssh host2 head -c {megabytes}MB /dev/zero > /dev/null"):  # fmt: skip
                begin = time.monotonic()
                done(*command, transfer)
                assert time.monotonic() - begin >= 0.95 * least, (rate, transfer)
    finally:
        done("rate", "1gbit")
    assert done("status").split().count("1gbit") == 8


def test_command_has_its_own_environment_input_and_status(four_hosts: None, tmp_path: Path) -> None:
    (tmp_path / "input").write_text("text")
    with open(tmp_path / "input") as file:
        assert done("exec", "host2", "cat", stdin=file) == "text"
    assert done("exec", "host2", "pwd").strip() == str(ROOT)
    assert "LAB=" not in done("exec", "host2", "env")
    assert lab("exec", "host2", "sh", "-c", "exit 7").returncode == 7


def traces(name: str) -> list[str]:
    """Of a lab, whatever the system still has."""
    here = lambda *command: subprocess.run(command, capture_output=True, text=True).stdout  # noqa: E731
    mounts = Path("/proc/self/mountinfo").read_text()
    found = [line for line in (here("ip", "netns", "list") + mounts).splitlines() if f"hvq-{name}-" in line]
    return found + [str(path) for path in Path("/run").glob(f"horovod-quant-lab/{name}*")]


def test_up_and_down_after_a_crash(possible: None) -> None:
    name = f"{NAME}_crash"
    up = subprocess.Popen(
        [LAB, "up", "3"], env={**os.environ, "LAB": name}, start_new_session=True, stdout=subprocess.DEVNULL
    )
    while not any("host2" in trace for trace in traces(name)):
        assert up.poll() is None
        time.sleep(0.01)
    os.killpg(up.pid, signal.SIGKILL)  # half-way
    up.wait()
    done("up", 2, name=name)
    assert done("exec", "host1", "ssh", "host2", "hostname", name=name).strip() == "host2"
    assert "host3" not in done("status", name=name)
    sleeping = subprocess.Popen([LAB, "exec", "host1", "sleep", "600"], env={**os.environ, "LAB": name})
    subprocess.run(["ip", "netns", "delete", f"hvq-{name}-switch"], check=True)
    done("down", name=name)
    assert not traces(name)
    assert sleeping.wait(timeout=60) != 0
    done("down", name=name)
    assert "there is no lab" in lab("status", name=name).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up"], "how many hosts"),
        (["up", "0"], "how many hosts"),
        (["up", "2", "fast"], "'fast' is not a rate"),
        (["rate", "1gbit"], "there is no lab"),
        (["exec", "host1", "true"], "there is no lab"),
        (["upp"], "scripts/lab help"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str, possible: None) -> None:
    completed = lab(*arguments, name=f"{NAME}_none")
    assert completed.returncode != 0
    assert message in completed.stdout


def test_asks_for_root_without_it() -> None:
    completed = lab("up", "2", before=() if os.geteuid() else ("unshare", "--user"))
    if completed.stdout.startswith("unshare:"):
        pytest.skip(f"cannot shed root here: {completed.stdout}")
    assert completed.returncode != 0
    assert "root is needed" in completed.stdout


def test_help_needs_nothing() -> None:
    assert "scripts/lab up 4 1gbit" in done("help")
