"""``horovod-quant doctor``, plain and under horovodrun, and in environments that really are broken."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "parallel"))

from launching import environment, horovodrun  # noqa: E402

import horovod_quant  # noqa: E402
from horovod_quant.analysis import pays  # noqa: E402
from horovod_quant.analysis.groups import torch_cache_names  # noqa: E402
from horovod_quant.analysis.models import MODELS  # noqa: E402
from horovod_quant.cli import main, probe, report  # noqa: E402
from horovod_quant.cli.findings import installed, kernels, network, settings, workers  # noqa: E402
from horovod_quant.cli.launch_context import LaunchContext  # noqa: E402
from horovod_quant.cli.report import NOTE, OK, PROBLEM, WARNING, Finding  # noqa: E402
from horovod_quant.schemes import GlobalQSGD  # noqa: E402

COMMAND = Path(sys.executable).with_name("horovod-quant")
TIMEOUT = 300

needs_horovod = pytest.mark.skipif(probe.horovod_folder() is None, reason="Horovod is not installed")


def run_doctor(
    *options: Any, python: Path | None = None, path: Path | None = None, **variables: str
) -> tuple[int, str]:
    """Exit status and output of the command, with ``path`` before all other modules."""
    command = [str(COMMAND)] if python is None else [str(python), "-m", "horovod_quant"]
    env = environment(variables)
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [*command, "doctor", *map(str, options)],
        capture_output=True, text=True, timeout=TIMEOUT, env=env, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def marked(output: str, mark: str) -> list[str]:
    """The findings with a mark, without horovodrun's prefixes."""
    lines = [re.sub(r"^\[[\d,]+\]<stdout>: ?", " ", line).strip() for line in output.splitlines()]
    return [line[len(mark) :].strip() for line in lines if line.startswith(f"{mark} ")]


def only(findings: list[str], containing: str) -> str:
    found = [finding for finding in findings if containing in finding]
    assert len(found) == 1, (containing, findings)
    return found[0]


def test_modules_that_lie_in_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    """It may be one that others can write to, as /tmp."""
    for name in ("json", "numpy", "torch", "horovod_quant"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w')\n")
    done = subprocess.run(
        [str(COMMAND), "doctor", "--framework", "torch"], cwd=tmp_path,
        capture_output=True, text=True, timeout=TIMEOUT, env=environment(), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "Will it run?" in done.stdout, done.stderr
    assert not (tmp_path / "imported").exists()


# ---- a sound installation -------------------------------------------------------------------------------------------


@needs_horovod
def test_plain_run_finds_all_well() -> None:
    status, output = run_doctor("--model", "bert-base")
    assert status == 0, output
    well = marked(output, OK)
    assert only(well, f"horovod-quant {horovod_quant.__version__}, Python {sys.version_info.major}.")
    for name, shown in probe.FRAMEWORKS.items():
        assert only(well, f"Horovod and horovod_quant.{name} work with it").startswith(shown)
    assert only(well, "built with ").startswith(f"Horovod {probe.version_of('horovod')}")
    assert only(well, "Horovod's cache, fusion buffer and cycle time suit bert-base")
    assert only(well, "Keras 2")
    titles = [line for line in output.splitlines() if line.endswith("?")]
    assert titles == ["Will it run?", "Is it the fast path?", "Will it pay here?"]
    assert "horovodrun -np 2 -H host1:1,host2:1 horovod-quant doctor" in only(marked(output, NOTE), "network")
    assert not re.search("carrier|control tensor|roll call|place", output)
    assert len(output.splitlines()) <= 24  # one screen


NOTES_LOADS = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "tensorflow") and b"horovod_quant.cli" in open("/proc/self/cmdline", "rb").read():
            open(f"{os.environ['LOADS']}/{name}.{os.getpid()}", "w").close()
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parallel
@needs_horovod
def test_two_workers_test_the_collectives_and_load_no_framework_needlessly(tmp_path: Path) -> None:
    """Each worker needs the framework that carries the collectives; the other one is loaded once."""
    (tmp_path / "sitecustomize.py").write_text(NOTES_LOADS)
    loads = tmp_path / "loads"
    loads.mkdir()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "LOADS": str(loads)}
    done = horovodrun("gloo", 2, [COMMAND, "doctor", "--model", "resnet50"], env=variables)
    assert done.returncode == 0, done.stdout
    assert marked(done.stdout, PROBLEM) == []
    well, notes = marked(done.stdout, OK), marked(done.stdout, NOTE)
    assert only(well, "the controller is Gloo; 2 of 2 workers on this host")
    assert only(well, "the same versions and kernels on 1 host")
    assert only(well, "allreduce of int32 and int64, Sum and Max, through PyTorch: exact")
    assert "--framework tensorflow tests it" in only(notes, "through TensorFlow: not tested in this run")
    assert re.search(
        r"allreduces of 2 workers on 1 host get [\d.]+ [GM]bit/s",
        only(notes, "says nothing about the network"),
    )
    assert done.stdout.count("Will it run?") == 1  # rank 0 alone prints
    assert "\x1b" not in done.stdout
    loaded = sorted(each.suffix and each.stem for each in loads.iterdir())
    assert loaded == ["tensorflow", "torch", "torch"]


@pytest.mark.parallel
@pytest.mark.extended
@needs_horovod
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="takes root and unshare")
def test_between_two_hosts_the_network_is_measured(tmp_path: Path) -> None:
    """Worker 1 has a host name of its own, one that Gloo can resolve."""
    doctor = f"exec '{COMMAND}' doctor --framework torch --model bert-base"
    script = tmp_path / "worker.sh"
    script.write_text(
        f'[ "$HOROVOD_RANK" = 0 ] || exec unshare --uts sh -c "hostname localhost; {doctor}"\n{doctor}\n'
    )
    done = horovodrun("gloo", 2, ["sh", script])
    assert done.returncode == 0, done.stdout
    well = marked(done.stdout, OK)
    assert re.search(
        r"of 2 workers on 2 hosts get [\d.,]+ [GM]bit/s; a small one takes ", only(well, "allreduces")
    )
    assert re.search(
        r"BERT-base, 8 hosts with an accelerator each and NCCL, \d+ Gbit/s: .*, modelled$",
        only(well, "the line of docs/pays.md"),
    )


@pytest.mark.parallel
@needs_horovod
def test_under_mpi_one_framework_is_tested_and_workers_are_compared(tmp_path) -> None:
    """The first framework; worker 1 is made to use other kernels."""
    script = tmp_path / "worker.sh"
    script.write_text(
        '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || export HOROVOD_QUANT_KERNELS=numpy\n'
        + f"exec '{COMMAND}' doctor\n"
    )
    done = horovodrun("mpi", 2, ["sh", script])
    assert done.returncode == 0, done.stdout
    assert marked(done.stdout, PROBLEM) == []
    well, warnings = marked(done.stdout, OK), marked(done.stdout, WARNING)
    assert only(well, "the controller is MPI; 2 of 2 workers on this host")
    assert only(well, "through PyTorch: exact")
    assert "not tested in this run" in only(marked(done.stdout, NOTE), "through TensorFlow")
    assert only(warnings, "kernels of worker 1 on ").partition(": ")[2].startswith("numpy, not native")
    assert "\x1b" not in done.stdout  # Open MPI's workers have a terminal


@pytest.mark.parallel
@pytest.mark.extended
@needs_horovod
def test_under_mpi_with_tensorflow() -> None:
    done = horovodrun("mpi", 2, [COMMAND, "doctor", "--framework", "tensorflow"])
    assert done.returncode == 0, done.stdout
    assert only(marked(done.stdout, OK), "through TensorFlow: exact")
    assert "PyTorch" not in done.stdout


@pytest.mark.parallel
@pytest.mark.extended
@needs_horovod
@pytest.mark.parametrize("missing", [0, 1])
def test_the_names_that_doctor_counts_are_those_in_horovods_cache(missing: int) -> None:
    """With one place less than the model's names take, Horovod says that it had to evict one."""
    names = torch_cache_names(GlobalQSGD(8), MODELS["tiny"])
    program = [sys.executable, Path(__file__).with_name("names_worker.py"), "torch", "global-qsgd"]
    variables = {"HOROVOD_CACHE_CAPACITY": str(names - missing), "HOROVOD_LOG_LEVEL": "warning"}
    done = horovodrun("gloo", 2, program, env=variables)
    assert done.stdout.count("EXCHANGED") == 2, done.stdout[-3000:]
    assert ("evicted" in done.stdout) == bool(missing), done.stdout[-3000:]


# ---- broken ones ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> tuple[Path, Path]:
    """A Python without any package, and a folder in which this package and numpy are."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    packages = folder / "packages"
    packages.mkdir()
    for source in (Path(horovod_quant.__file__).parent, *Path(np.__file__).parents[1].glob("numpy*")):
        (packages / source.name).symlink_to(source)
    return folder / "venv" / "bin" / "python", packages


def test_an_environment_with_nothing_but_numpy(bare) -> None:
    python, packages = bare
    status, output = run_doctor(python=python, path=packages)
    assert status == 1
    problems = marked(output, PROBLEM)
    remedy = only(problems, "Horovod is not installed")
    assert "build it with HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_TENSORFLOW=1, using the commands in /" in remedy
    assert Path(remedy.rpartition(" in ")[2]).read_text().startswith("# Installing")
    question = only(problems, "which framework do you train with? PyTorch or TensorFlow is not installed")
    assert question.endswith("pip install torch or tensorflow, then build Horovod with it")
    assert "2 problems, no warnings" in output
    assert only(marked(output, OK), " kernels")


def test_kernels_and_settings_that_slow_down_are_warnings_with_remedies(bare) -> None:
    python, packages = bare
    _, output = run_doctor(
        "--model", "resnet50", python=python, path=packages,
        HOROVOD_QUANT_LIBRARY="/nowhere/native.so", HOROVOD_CACHE_CAPACITY="100", HOROVOD_AUTOTUNE="1",
        HOROVOD_FUSION_THRESHOLD="0", HOROVOD_CYCLE_TIME="20", HOROVOD_QUANT_DISABLE="1",
    )  # fmt: skip
    warnings = marked(output, WARNING)
    library = only(
        warnings, "numpy kernels, much slower than the native ones: cannot load /nowhere/native.so"
    )
    assert "unset HOROVOD_QUANT_LIBRARY" in library
    cache = only(warnings, "HOROVOD_CACHE_CAPACITY=100")
    assert "174 in PyTorch, 390 in TensorFlow, more than the cache holds" in cache
    assert cache.endswith("set HOROVOD_CACHE_CAPACITY=1024 (horovodrun --cache-capacity 1024)")
    assert "resnet50's 85 small gradients" in only(warnings, "HOROVOD_FUSION_THRESHOLD=0 bytes")
    assert "up to 60 ms per step; unset it, or set it to 1" in only(warnings, "HOROVOD_CYCLE_TIME=20 ms")
    assert only(warnings, "HOROVOD_AUTOTUNE")
    assert only(warnings, "HOROVOD_QUANT_DISABLE=1: Horovod reduces all gradients, uncompressed")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"HOROVOD_QUANT_KERNELS": "native", "HOROVOD_QUANT_LIBRARY": "/nowhere"}, "cannot load /nowhere"),
        ({"HOROVOD_QUANT_KERNELS": "fast"}, "HOROVOD_QUANT_KERNELS=fast: no such backend"),
        ({"HOROVOD_QUANT_ISA": "avx1024"}, "instruction set 'avx1024'"),
    ],
)
def test_kernels_that_cannot_run_are_problems(bare, variables: dict[str, str], message: str) -> None:
    python, packages = bare
    _, output = run_doctor(python=python, path=packages, **variables)
    problem = only(marked(output, PROBLEM), "no kernels: ")
    assert message in problem
    assert problem.endswith(f"unset or correct {' and '.join(variables)}")


def test_kernels_asked_for_are_named(bare) -> None:
    python, packages = bare
    _, output = run_doctor(python=python, path=packages, HOROVOD_QUANT_KERNELS="numpy")
    assert only(marked(output, WARNING), "numpy kernels, requested by HOROVOD_QUANT_KERNELS; unset")
    _, output = run_doctor(python=python, path=packages, HOROVOD_QUANT_KERNELS="tensorflow")
    assert only(marked(output, OK), "TensorFlow kernels, requested by HOROVOD_QUANT_KERNELS")


@pytest.mark.parametrize("own", ["tensorflow", "triton"])
def test_what_the_host_has_is_said_besides_a_frameworks_kernels(bare, own: str) -> None:
    python, packages = bare
    _, output = run_doctor(
        python=python, path=packages, HOROVOD_QUANT_KERNELS=own, HOROVOD_QUANT_LIBRARY="/nowhere/native.so"
    )
    assert only(marked(output, OK), "requested by HOROVOD_QUANT_KERNELS; where there are none")
    assert only(marked(output, WARNING), "numpy kernels, much slower than the native ones: cannot load")


@pytest.mark.parametrize(
    ("triton", "mark", "text"),
    [
        (None, WARNING, "copied back; pip install triton"),
        ("3.7.1", OK, "quantized there, by Triton's kernels"),
        ("3.1.0", WARNING, "needs a newer Triton than"),
    ],
)
def test_pytorchs_gradients_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, triton: str | None, mark: str, text: str
) -> None:
    monkeypatch.setattr(probe, "version_of", lambda *names: triton)
    if triton is not None:
        installed = pytest.importorskip("triton")
        if triton < "3.4":
            monkeypatch.delattr(installed, "constexpr_function")
            for name in [each for each in sys.modules if each.startswith("horovod_quant.kernels.triton")]:
                monkeypatch.delitem(sys.modules, name)
    (found,) = kernels.gpu_kernel_findings({"torch": {"gpus": 1}})
    assert found.mark == mark
    assert text in found.line
    assert not kernels.gpu_kernel_findings({"torch": {"gpus": 0}, "tensorflow": {"gpus": 1}})


def shadow_horovod(folder: Path, library: bytes | None) -> Path:
    """A folder with the installed Horovod, but for PyTorch's library: another one, or none."""
    installed = Path(str(probe.horovod_folder()))
    shadow = folder / "horovod"
    (shadow / "torch").mkdir(parents=True)
    for source in installed.iterdir():
        if source.name not in ("torch", "__pycache__"):
            (shadow / source.name).symlink_to(source)
    for source in (installed / "torch").iterdir():
        if not source.name.startswith("mpi_lib"):
            (shadow / "torch" / source.name).symlink_to(source)
        elif library is not None:
            (shadow / "torch" / source.name).write_bytes(library)
    return folder


@needs_horovod
def test_horovod_without_its_library_for_pytorch(tmp_path) -> None:
    """``import horovod.torch`` succeeds then, and ``horovodrun --check-build`` lists PyTorch."""
    shadow = shadow_horovod(tmp_path, None)
    done = subprocess.run(
        [sys.executable, "-c", "import horovod.torch; print('imported')"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(shadow)},
    )  # fmt: skip
    assert "imported" in done.stdout
    status, output = run_doctor("--framework", "torch", path=shadow)
    assert status == 1
    problem = only(marked(output, PROBLEM), "PyTorch ")
    assert "Horovod was built without it (whatever horovodrun --check-build says)" in problem
    assert "rebuild Horovod with HOROVOD_WITH_PYTORCH=1, using the commands in " in problem


@needs_horovod
def test_a_library_that_cannot_be_loaded(tmp_path) -> None:
    status, output = run_doctor("--framework", "torch", path=shadow_horovod(tmp_path, b"no library"))
    assert status == 1
    problem = only(marked(output, PROBLEM), "Horovod's library for it cannot be loaded")
    assert "AttributeError" in problem or "OSError" in problem or "ImportError" in problem


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "PyTorch is not installed"),
        ("raise ImportError('libc10.so: cannot open shared object file')",
         "PyTorch cannot be imported: ImportError: libc10.so: cannot open shared object file"),
        ("import os; os.kill(os.getpid(), 11)", "PyTorch cannot be imported: killed by signal 11"),
        ("raise SystemExit(3)", "PyTorch cannot be imported: exit status 3"),
        ("import time; time.sleep(60)", "PyTorch cannot be imported: no answer within 2 seconds"),
    ],
    ids=["hidden", "broken", "crashing", "leaving", "hanging"],
)  # fmt: skip
def test_a_framework_that_cannot_be_imported(bare, tmp_path, source: str, message: str) -> None:
    python, packages = bare
    (tmp_path / "torch.py").write_text(source + "\n")
    for package in packages.iterdir():
        (tmp_path / package.name).symlink_to(package)
    options = ["--timeout", 2 if "sleep" in source else TIMEOUT]
    status, output = run_doctor("--framework", "torch", *options, python=python, path=tmp_path)
    assert status == 1
    assert only(marked(output, PROBLEM), message)


@needs_horovod
def test_a_framework_is_not_missed_where_another_one_works(tmp_path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ModuleNotFoundError('hidden', name='tensorflow')\n")
    status, output = run_doctor(path=tmp_path)
    assert status == 0, output
    assert only(marked(output, NOTE), "TensorFlow is not installed")


# ---- judgements on what this machine does not have -------------------------------------------------------------------

SOUND = {
    "framework": "tensorflow",
    "stage": "done",
    "version": "2.16.2",
    "gpus": 0,
    "keras": "2.16.0",
    "library": "mpi_lib.so",
    "built": {"mpi": True, "gloo": True, "nccl": False, "ccl": False, "ddl": False},
}  # fmt: skip


def test_without_horovod_pytorch_has_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "horovod_folder", lambda: None)
    finding = installed.horovod_finding({"torch": {"distributed": True}})
    assert (finding.mark, finding.text) == (NOTE, "Horovod is not installed: DDP and FSDP2 work without it")
    assert finding.remedy.startswith("or build it with HOROVOD_WITH_PYTORCH=1")
    assert installed.horovod_finding({"torch": {"distributed": False}}).mark == PROBLEM
    assert installed.horovod_finding({"tensorflow": {}}).mark == PROBLEM


def judged(**changes: Any) -> list[Finding]:
    return installed.framework_findings("tensorflow", {**SOUND, **changes}, True, True)


def test_keras_3_does_not_average() -> None:
    (warned,) = [finding for finding in judged(keras="3.15.1") if finding.mark == WARNING]
    assert "Keras 3.15.1" in warned.line
    assert "horovod_quant.keras" in warned.line
    (warning,) = [finding for finding in judged(standalone_keras="3.15.1") if finding.mark == WARNING]
    assert "horovod.keras uses Keras 3.15.1" in warning.line


@needs_horovod
@pytest.mark.skipif((probe.version_of("keras") or "0")[0] != "3", reason="Keras 2 is installed")
def test_keras_3_is_seen() -> None:
    status, output = run_doctor("--framework", "tensorflow")
    assert status == 0
    assert only(marked(output, WARNING), "does not average gradients under Keras 3")


def test_gpus_without_nccl() -> None:
    (warning,) = [finding for finding in judged(gpus=2) if finding.mark == WARNING]
    assert "HOROVOD_GPU_OPERATIONS=NCCL" in warning.remedy
    assert judged(gpus=2, built={**SOUND["built"], "nccl": True})[0].mark == OK


def test_horovod_built_with_another_version() -> None:
    warning = judged(built_for="2.15.1")[0]
    assert warning.mark == WARNING
    assert "was built with TensorFlow 2.15.1" in warning.text


def with_workers(*workers: dict[str, Any]) -> dict[str, Any]:
    started = {"size": len(workers), "local_size": 1, "mpi": False, "gloo": True}
    return {**SOUND, "stage": "done", "run": {**started, "workers": list(workers)}}


def test_an_allreduce_that_is_not_exact_is_a_problem() -> None:
    facts = with_workers({"wrong": []}, {"wrong": ["int64 Max"]})
    finding = workers.exactness_finding("tensorflow", facts)
    assert finding.mark == PROBLEM
    assert "not exact on 1 of 2 workers (worker 1: int64 Max)" in finding.text


def test_a_run_that_fails_is_a_problem() -> None:
    facts = {**SOUND, "stage": "run", "error": "no answer within 300 seconds"}
    finding = workers.exactness_finding("tensorflow", facts)
    assert finding.mark == PROBLEM
    assert "no answer within 300 seconds" in finding.text


def test_workers_with_other_versions_are_a_problem() -> None:
    alike = {"host": "a", "Horovod": "0.28.1", "kernels": "native", "wrong": []}
    facts = {"tensorflow": with_workers(alike, {**alike, "host": "b", "Horovod": "0.27.0"})}
    (finding,) = workers.worker_findings(facts)
    assert finding.mark == PROBLEM
    assert "Horovod of worker 1 on b (1 such): 0.27.0, not 0.28.1 as on worker 0" in finding.text


def test_workers_that_do_not_see_each_other_are_a_problem() -> None:
    started = {"size": 1, "local_size": 1, "mpi": True, "gloo": False}
    assert workers.controller_finding(started, LaunchContext(0, 2)).mark == PROBLEM


def test_the_tested_integers_wrap_around() -> None:
    for bits in (32, 64):
        everybody = np.stack([probe.integers(bits, rank) for rank in range(3)])
        exact = np.add.reduce(everybody.astype(object), axis=0)
        assert (np.abs(exact.astype(float)) > 2.0 ** (bits - 1)).mean() > 0.1
        wrapped = np.add.reduce(everybody, axis=0, dtype=everybody.dtype)
        assert [int(value) for value in wrapped] == [
            (int(value) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for value in exact
        ]


@pytest.mark.parametrize(
    ("given", "number", "shown"),
    [
        (None, 1024, "X=1024"),
        ("2048", 2048, "X=2048"),
        (" 3.5 ms", 3.5, "X=3.5 ms"),
        ("lots", 0, "X='lots', which Horovod reads as 0"),
        ("", 0, "X='', which Horovod reads as 0"),
    ],
)
def test_settings_are_read_as_horovod_does(given: str | None, number: float, shown: str) -> None:
    assert settings.number({} if given is None else {"X": given}, "X", 1024) == (number, shown)


@pytest.mark.parametrize(
    "setting", ["HOROVOD_CACHE_CAPACITY", "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"]
)
def test_a_setting_that_is_no_number_is_a_warning(setting: str) -> None:
    findings = settings.findings({setting: "lots"}, "tiny", ["torch"])
    (warning,) = [finding for finding in findings if finding.mark == WARNING]
    assert f"{setting}='lots', which Horovod reads as 0" in warning.text


@pytest.mark.parametrize("model", [None, *MODELS])
def test_defaults_suit_every_model(model: str | None) -> None:
    # In TensorFlow, where each gradient has its own collectives, the 467 of ResNet-152 do not fit.
    (finding,) = settings.findings({}, model, list(probe.FRAMEWORKS))
    crowded = model == "resnet152"
    assert finding.mark == (WARNING if crowded else OK)
    if crowded:
        assert "HOROVOD_CACHE_CAPACITY=2048" in finding.remedy
        assert settings.findings({}, model, ["torch"])[0].mark == OK


# ---- will it pay here ------------------------------------------------------------------------------------------------


def with_network(hosts: int, bytes_per_second: float) -> dict[str, Any]:
    """Facts of a run between so many hosts."""
    workers = [{"host": f"host{rank}"} for rank in range(hosts)]
    measured = {"bytes_per_second": bytes_per_second, "small_seconds": 1e-3}
    return {"torch": {"run": {"size": hosts, "workers": workers, "network": measured}}}


@pytest.mark.parametrize(
    ("hosts", "bytes_per_second", "line"),
    [
        (2, 1.1e8, "BERT-base, 8 hosts, 1 Gbit/s"),
        (12, 1.0e9, "BERT-base, 8 hosts, 10 Gbit/s"),
        (24, 1.1e10, "BERT-base, 32 hosts, 100 Gbit/s"),
    ],
)
def test_the_line_of_the_table_that_applies_is_named(hosts: int, bytes_per_second: float, line: str) -> None:
    measured, found = network.findings(with_network(hosts, bytes_per_second), "bert-base")
    assert f"allreduces of {hosts} workers on {hosts} hosts get " in measured.text
    where, _, rate = line.rpartition(", ")
    assert f"nearest: {where} with an accelerator each and NCCL, {rate}: " in found.text
    row = next(row for row in (ROOT / "docs/pays.md").read_text().splitlines() if where in row)
    assert (
        found.text.rpartition(": ")[2]
        == row.split("|")[2 + pays.GIGABITS.index(int(rate.split()[0]))].strip()
    )


def test_one_host_says_nothing_of_a_network() -> None:
    (note,) = network.findings(with_network(1, 1e9), None)
    assert note.mark == NOTE
    assert "-H host1:1,host2:1" in note.remedy
    assert len(network.findings(with_network(2, 1e9), None)) == 1 + len(pays.JOBS)


# ---- the command and its output --------------------------------------------------------------------------------------


def test_the_summary_counts() -> None:
    findings = [Finding(PROBLEM, "a"), Finding(WARNING, "b", "c"), Finding(WARNING, "d"), Finding(OK, "e")]
    assert report.summary([report.Section("all", findings)]) == "1 problem, 2 warnings"
    assert findings[1].line == "b; c"


@pytest.mark.skipif(shutil.which("script") is None, reason="script is not installed")
def test_on_a_terminal_there_are_colours(bare) -> None:
    pytest.importorskip("rich")
    code = (
        "from horovod_quant.cli.report import *;"
        "show([Section('Title', [Finding('problem', 'x' * 30 + ' ' + 'y' * 80, 'repair it')])])"
    )
    done = subprocess.run(
        ["script", "-qec", f'{sys.executable} -c "{code}"', "/dev/null"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    assert "\x1b[1;31m" in done.stdout, done.stdout
    assert "repair it" in done.stdout


def test_help_and_version(capsys) -> None:
    for option, expected in {
        "--help": "doctor",
        "--version": f"horovod-quant {horovod_quant.__version__}",
    }.items():
        with pytest.raises(SystemExit) as left:
            main.main([option])
        assert left.value.code == 0
        assert expected in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main.main(["operate"])
    assert left.value.code == 2
