"""What people install: the source distribution, the wheel, and a stranger's first two minutes with it."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from environments import ROOT, Environment, build, files_of, make_environment

from horovod_quant.cli import probe
from horovod_quant.schemes import registry

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1800)]

TWO_MINUTES = 120.0

_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


class Installed(NamedTuple):
    """The wheel in an environment, what pip said was there before and after, and the files that it changed or added."""

    environment: Environment
    before: list[str]
    after: list[str]
    changed: set[Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    environment = make_environment(tmp_path_factory.mktemp("stranger"))
    before, files_before = _packages(environment), files_of(environment)
    done = environment.run("pip", "install", "--no-index", built[1])
    assert done.returncode == 0, done.stdout
    files = files_of(environment)
    assert files_before.keys() <= files.keys(), "files are gone"
    changed = {path for path, status in files.items() if files_before.get(path) != status}
    return Installed(environment, before, _packages(environment), changed)


def _packages(environment: Environment) -> list[str]:
    return environment.run("pip", "freeze", "--all").stdout.splitlines()


def test_the_source_distribution_can_be_built_tested_and_read(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in (
        "tests/helpers.py",
        "tests/conftest.py",
        "tests/parallel/worker.py",
        "examples/minimal_torch.py",
        "docs/install.md",
        "scripts/setup",
        "setup.py",
        "pyproject.toml",
        "LICENSE",
        "CHANGELOG.md",
    ):
        assert wanted in names
    kernels = ROOT / "horovod_quant" / "kernels"
    assert {
        f"horovod_quant/kernels/{file.name}" for file in (*kernels.glob("*.h"), *kernels.glob("*.cpp"))
    } <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    results = {name for name in names if name.startswith("docs/results/") and "." in name}
    shown = set(re.findall(r"docs/results/[\w-]+\.png", (ROOT / "README.md").read_text()))
    assert results == shown | {"docs/results/kernel-speeds.json"}
    assert not [name for name in names if "reproduc" in name]


def test_the_tests_of_the_source_distribution_import_what_it_has(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path)
    (folder,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(folder)}
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_wheel_has_types_kernels_and_the_page_on_installing(built: tuple[Path, Path]) -> None:
    assert re.search(r"-cp39-abi3-\w+\.whl$", built[1].name)
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        page = archive.read("horovod_quant/install.md").decode()
    with tarfile.open(built[0]) as sources:
        (member,) = (member for member in sources if member.name.endswith("/docs/install.md"))
        source = sources.extractfile(member).read().decode()
    # The wheel has no other page, so only links into the web are left.
    expected = re.sub(r"\[([\w-]+\.md)\]\(\1\)", r"docs/\1", source)
    assert "docs/gpu.md" in expected
    assert page == expected
    assert all(link.startswith("https:") for link in re.findall(r"\]\(([^)]+)\)", page))
    assert {"horovod_quant/py.typed", "horovod_quant/torch/__init__.pyi"} <= names
    package = ROOT / "horovod_quant"
    assert {f"horovod_quant/{file.relative_to(package)}" for file in package.rglob("*.py")} <= names
    assert any(re.fullmatch(r"horovod_quant/kernels/_native.*\.so", name) for name in names)
    assert not [name for name in names if name.startswith("tests") or name.endswith((".cpp", ".h"))]
    assert re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.M) == ["numpy"]
    assert "Project-URL: Horovod, https://github.com/horovod/horovod" in metadata
    assert "openmpi" not in metadata


def test_installing_changes_no_other_package(installed: Installed) -> None:
    assert not any(line.startswith("horovod-quant") for line in installed.before)
    assert any(line.startswith("horovod") for line in installed.before) or not probe.horovod_folder()
    added = set(installed.after) - set(installed.before)
    assert {line.partition(" ")[0].partition("=")[0] for line in added} == {"horovod-quant"}
    assert set(installed.before) <= set(installed.after)
    site = Path(installed.environment.run("python", "-c", _SITE).stdout.strip())
    command = installed.environment.bin / "horovod-quant"
    own = {path for path in installed.changed if path == command or _is_ours(path, site)}
    assert installed.changed == own
    assert {command, site / "horovod_quant" / "__init__.py"} <= own


def _is_ours(path: Path, site: Path) -> bool:
    """Whether a file belongs to the package or its metadata."""
    top = path.relative_to(site).parts[0] if path.is_relative_to(site) else ""
    return top == "horovod_quant" or top.startswith("horovod_quant-")


def test_messages_of_the_installed_package_name_a_page_that_is_there(installed: Installed) -> None:
    program = "import sys; sys.modules['horovod'] = None; import horovod_quant.torch as q; q.QSGD()"
    last = installed.environment.run("python", "-c", program).stdout.strip().splitlines()[-1]
    found = re.search(r"; (/.*/install\.md) has the commands$", last)
    assert found, last
    page = Path(found[1])
    assert page.is_relative_to(installed.environment.bin.parent)
    assert page.read_text().startswith("# Installing")


@pytest.mark.parallel
@pytest.mark.skipif(probe.horovod_folder() is None, reason="Horovod is not installed")
def test_a_stranger_trains_with_every_method_in_two_minutes(installed: Installed) -> None:
    """From the installed wheel on. Where others compute as well, what counts is the CPU time that two cores have."""
    environment = installed.environment
    shutil.copy(ROOT / "examples" / "minimal_torch.py", environment.folder)
    quiet, begin, cpu_begin = os.getloadavg()[0] < 1, time.monotonic(), cpu_seconds()
    for method in (*(kind.__name__ for kind in registry.own()), "Auto"):
        done = environment.run("horovodrun", "--gloo", "-np", 2, "python", "minimal_torch.py", method)
        assert done.returncode == 0, done.stdout[-3000:]
        accuracy = re.search(rf"{method}\(.*\): accuracy (\S+)%", done.stdout)
        assert accuracy, done.stdout[-3000:]
        assert float(accuracy[1]) > 80
    done = environment.run("horovod-quant", "doctor", "--framework", "torch")
    assert done.returncode == 0, done.stdout
    assert "no problems" in done.stdout
    bench = ["horovod-quant", "bench", "--framework", "torch", "--model", "tiny", "--rounds", 3]
    done = environment.run("horovodrun", "--gloo", "-np", 2, *bench, "--json", "bench.json")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "In the script" in done.stdout
    assert (environment.folder / "bench.json").exists()
    wall, cpu = time.monotonic() - begin, cpu_seconds() - cpu_begin
    assert cpu < 2 * TWO_MINUTES
    assert wall < TWO_MINUTES or not quiet


def cpu_seconds() -> float:
    """Of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
