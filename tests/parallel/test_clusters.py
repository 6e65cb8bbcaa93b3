"""The files of examples/cluster/, in a lab: mpirun, Slurm and an elastic job between its hosts."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import BIN, ROOT
from test_lab import done, four_hosts, lab, possible  # noqa: F401

pytestmark = [pytest.mark.parallel, pytest.mark.extended]

CLUSTER = ROOT / "examples" / "cluster"
DIGITS = (
    "python",
    ROOT / "examples" / "torch_digits.py",
    "--quiet",
    "--epochs",
    "1",
    "--compression",
    "global-qsgd",
)
TRAINED = re.compile(r"test accuracy (\d+)\.\d+%, 10 steps of [\d,]+ bytes sent \(3\.8x less")

SLURM = Path(os.environ.get("SLURM_ROOT", "/"))
"""Where Slurm's packages are: the system, or a folder into which `dpkg -x` has unpacked them."""

SLURM_LIBRARIES = SLURM / "usr" / "lib" / "x86_64-linux-gnu"
NODES = ("host2", "host3")
SETTINGS = """\
ClusterName=lab
SlurmctldHost=host1
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
PluginDir={libraries}/slurm-wlm
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
StateSaveLocation={folder}
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=host[2-3] State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
"""Of a cluster without munge, cgroups or accounting: the lab's hosts trust each other."""


def test_mpirun(four_hosts: None) -> None:  # noqa: F811
    command = ("env", f"PYTHONPATH={ROOT}", CLUSTER / "mpirun.sh", "host1:1,host2:1", *DIGITS)
    assert TRAINED.search(done("exec", "host1", *command, timeout=500))


def test_an_elastic_job(four_hosts: None, tmp_path: Path) -> None:  # noqa: F811
    """It starts with the hosts that the script lists; test_elastic.py lets them come and go."""
    hosts = tmp_path / "hosts"
    hosts.write_text("host1:1\nhost2:1\n")
    script = ROOT / "examples" / "torch_digits_elastic.py"
    output = done(
        "exec", "host1", "env", f"PYTHONPATH={ROOT}", f"HOSTS_FILE={hosts}", "INTERFACE=eth0",
        CLUSTER / "elastic.sh", 2, 4, "python", script, "--epochs", "1", "--method", "global-qsgd-8", timeout=500,
    )  # fmt: skip
    assert "accuracy" in output


@pytest.fixture
def slurm(four_hosts: None, tmp_path: Path) -> Iterator[list[Any]]:  # noqa: F811
    """What comes before a command of Slurm on host1: a controller runs there, and host2 and host3 are its nodes."""
    if not (SLURM / "usr" / "sbin" / "slurmctld-wlm").exists():
        pytest.skip(
            "LEFT OUT, because Slurm is not here: apt-get install slurm-wlm, or unpack its packages and set SLURM_ROOT"
        )
    (tmp_path / "slurm.conf").write_text(SETTINGS.format(libraries=SLURM_LIBRARIES, folder=tmp_path))
    (tmp_path / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    libraries = [SLURM_LIBRARIES / "slurm-wlm"]
    if SLURM != Path("/"):  # the system's own would come before what Python was built with
        libraries.append(SLURM_LIBRARIES)
    environment = [
        "env", f"SLURM_CONF={tmp_path / 'slurm.conf'}", f"PYTHONPATH={ROOT}",
        f"LD_LIBRARY_PATH={':'.join(map(str, libraries))}",
        f"PATH={SLURM}/usr/bin:{BIN}:/usr/bin:/bin:/usr/sbin:/sbin",
    ]  # fmt: skip
    programs = SLURM / "usr" / "sbin"
    done("exec", "host1", *environment, programs / "slurmctld-wlm")
    for node in NODES:
        done("exec", node, "mkdir", "-p", "/run/slurmd")
        done(
            "exec", node, *environment, programs / "slurmd-wlm", "-N", node, "-d", programs / "slurmstepd-wlm"
        )
    yield environment
    for node in ("host1", *NODES):
        lab("exec", node, "sh", "-c", "kill $(cat /run/slurmctld.pid /run/slurmd.pid 2> /dev/null)")


def test_slurm(slurm: list[Any], tmp_path: Path) -> None:
    output = tmp_path / "output"
    done(
        "exec", "host1", *slurm, "sbatch", "--wait", f"--output={output}", CLUSTER / "slurm.sbatch", *DIGITS,
        timeout=500,
    )  # fmt: skip
    deadline = time.monotonic() + 30  # the file is written on another host
    while not (found := TRAINED.search(output.read_text())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found, output.read_text()[-3000:]
