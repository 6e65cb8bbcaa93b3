"""scripts/setup --gpu: what is missing is named before anything is downloaded. Nothing is installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parallel.launching import ROOT

SETUP = ROOT / "scripts" / "setup"
OWN = ("CUDA_HOME", "HOROVOD_NCCL_HOME", "TORCH", "VENV")  # what would lead the script elsewhere
TOOLS = ("cat", "dirname", "head", "id", "ln", "mkdir", "mv", "readlink", "sed", "uname")


def run(command: list[str], **variables: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    environment.update({name: str(value) for name, value in variables.items()})
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, env=environment,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def setup(folder: Path, *options: str, **variables: str | Path) -> str:
    """What the script says, which has to end with an error before it makes an environment."""
    done = run(
        [str(SETUP), *options], VENV=folder / "venv", HOROVOD_QUANT_CACHE=folder / "cache", **variables
    )
    assert done.returncode == 1, done.stdout
    assert not list((folder / "venv").glob("[!.]*"))
    assert not (folder / "cache").exists()
    return done.stdout


def functions(folder: Path, code: str, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs code that uses the functions of scripts/cuda.sh, where there is no nvcc and no NCCL."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for tool in TOOLS:
        if not (tools / tool).exists():
            (tools / tool).symlink_to(str(shutil.which(tool)))
    script = f"""
        source {ROOT}/scripts/common.sh
        source {ROOT}/scripts/cuda.sh
        USUAL_CUDA={folder}/cuda USUAL_NCCL_INCLUDE={folder}/include SITE={folder}/site KIND=nccl
        torch_version() {{ echo 2.13.0; }}
        installed() {{ echo 2.13.0; }}
        {code}"""
    return run([str(shutil.which("bash")), "-c", script], PATH=tools, VENV=folder, **variables)


def toolkit(folder: Path, version: str = "13.0") -> Path:
    """A folder like that of CUDA's toolkit, with an nvcc that says only which version it is."""
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime.h").touch()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
    nvcc.chmod(0o755)
    return folder


def pytorch(folder: Path, cuda: str) -> None:
    (folder / "site" / "torch").mkdir(parents=True)
    (folder / "site" / "torch" / "version.py").write_text(f"cuda: Optional[str] = {cuda}\nhip = None\n")


def nccl_wheel(folder: Path) -> Path:
    wheel = folder / "site" / "nvidia" / "nccl"
    for name in ("include/nccl.h", "lib/libnccl.so.2"):
        (wheel / name).parent.mkdir(parents=True)
        (wheel / name).touch()
    return wheel


# ---- arguments, and what an environment is for ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [["--gpus"], ["--gpu", "host"], ["--gpu=nccl"], ["--framework"]])
def test_an_unknown_option_is_refused(options: list[str]) -> None:
    done = run([str(SETUP), *options])
    assert done.returncode == 2
    assert (
        f"setup: {' '.join(options)}: no such option; use none, --gpu, --gpu=host, --gpu=check, --latest or"
        in done.stdout
    )


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("nccl", ["--gpu=host"], "was made with --gpu and not with --gpu=host; remove it, or set VENV="),
        ("cpu", ["--gpu"], "was made for the CPU and not with --gpu; remove it"),
        ("check", ["--gpu=host"], "was made with --gpu=check and not with --gpu=host; remove it"),
    ],
)
def test_an_environment_is_for_one_kind(tmp_path: Path, kind: str, options: list[str], message: str) -> None:
    state = tmp_path / "venv" / ".setup"
    state.mkdir(parents=True)
    (state / "kind").write_text(f"{kind}\n")
    assert message in setup(tmp_path, *options)


def test_an_environment_for_a_gpu_stays_one(tmp_path: Path) -> None:
    state = tmp_path / "venv" / ".setup"
    state.mkdir(parents=True)
    (state / "kind").write_text("host\n")
    (state / "installing").touch()  # beginning it anew does not make it forget
    assert "has no bin/nvcc" in setup(tmp_path, CUDA_HOME=tmp_path)


# ---- CUDA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--gpu", "--gpu=host", "--gpu=check"])
def test_a_cuda_home_without_nvcc(tmp_path: Path, option: str) -> None:
    told = setup(tmp_path, option, CUDA_HOME=tmp_path)
    assert f"CUDA_HOME={tmp_path} has no bin/nvcc; set it to the folder of a whole CUDA toolkit" in told


def test_a_toolkit_of_another_cuda(tmp_path: Path) -> None:
    cuda = toolkit(tmp_path / "cuda", "12.4")
    told = setup(tmp_path, "--gpu", CUDA_HOME=cuda)
    assert f"{cuda}/bin/nvcc is of CUDA 12.4, but PyTorch " in told
    assert "is built with CUDA 13.0; set CUDA_HOME to a toolkit of CUDA 13, or TORCH to a PyTorch" in told


def test_a_toolkit_of_another_cuda_than_the_chosen_pytorch(tmp_path: Path) -> None:
    told = setup(tmp_path, "--gpu", CUDA_HOME=toolkit(tmp_path / "cuda"), TORCH="2.13.0+cu126")
    assert "is of CUDA 13.0, but PyTorch 2.13.0+cu126 is built with CUDA 12.6" in told


def test_pytorch_for_the_cpu(tmp_path: Path) -> None:
    told = setup(tmp_path, "--gpu", CUDA_HOME=toolkit(tmp_path / "cuda"), TORCH="2.13.0+cpu")
    assert "TORCH=2.13.0+cpu is PyTorch's CPU build" in told


def test_no_nvcc(tmp_path: Path) -> None:
    done = functions(tmp_path, "find_cuda")
    assert done.returncode == 1
    assert "nvcc is missing, CUDA's compiler" in done.stdout
    assert f"neither is it on PATH nor in {tmp_path}/cuda; install CUDA's toolkit, or set" in done.stdout


def test_nvcc_without_headers(tmp_path: Path) -> None:
    cuda = toolkit(tmp_path / "cuda")
    (cuda / "include" / "cuda_runtime.h").unlink()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "nvcc").symlink_to(cuda / "bin" / "nvcc")
    done = functions(tmp_path, "find_cuda")
    assert done.returncode == 1
    assert f"{cuda}/bin/nvcc is there, but not the rest of CUDA's toolkit; set CUDA_HOME" in done.stdout


def test_the_toolkit_is_found_behind_a_link_or_a_script(tmp_path: Path) -> None:
    usual = toolkit(tmp_path / "cuda")
    other = toolkit(tmp_path / "other")
    (tmp_path / "tools").mkdir()
    nvcc = tmp_path / "tools" / "nvcc"
    nvcc.symlink_to(other / "bin" / "nvcc")
    assert functions(tmp_path, 'find_cuda; echo "$CUDA_HOME"').stdout.strip() == str(other)
    nvcc.unlink()
    nvcc.write_text(f'#!/bin/sh\nexec {usual}/bin/nvcc "$@"\n')
    nvcc.chmod(0o755)
    assert functions(tmp_path, 'find_cuda; echo "$CUDA_HOME"').stdout.strip() == str(usual)


def test_pytorch_turned_out_to_be_without_cuda(tmp_path: Path) -> None:
    pytorch(tmp_path, "None")
    done = functions(tmp_path, f"prepare_gpu_build {tmp_path}")
    assert done.returncode == 1
    assert "PyTorch 2.13.0 is built without CUDA" in done.stdout


# ---- NCCL -----------------------------------------------------------------------------------------------------------


def test_no_nccl(tmp_path: Path) -> None:
    pytorch(tmp_path, "'13.0'")
    done = functions(tmp_path, f"prepare_gpu_build {tmp_path}", CUDA_HOME=toolkit(tmp_path / "cuda"))
    assert done.returncode == 1
    assert (
        f"NCCL is missing: the wheel that comes with PyTorch's CUDA build (nvidia-nccl) is not in {tmp_path}"
        in (done.stdout)
    )
    assert "or do without it: scripts/setup --gpu=host" in done.stdout


def test_an_nccl_home_without_nccl(tmp_path: Path) -> None:
    told = setup(tmp_path, "--gpu", CUDA_HOME=toolkit(tmp_path / "cuda"), HOROVOD_NCCL_HOME=tmp_path)
    assert f"HOROVOD_NCCL_HOME={tmp_path} has no include/nccl.h; set it to NCCL's folder, or unset it" in told


def test_the_wheel_can_be_linked_to(tmp_path: Path) -> None:
    pytorch(tmp_path, "'13.0'")
    wheel, cuda = nccl_wheel(tmp_path), toolkit(tmp_path / "cuda")
    code = f'prepare_gpu_build {tmp_path}\necho "$HOROVOD_GPU_OPERATIONS $HOROVOD_CUDA_HOME $HOROVOD_NCCL_INCLUDE"'
    done = functions(tmp_path, code, CUDA_HOME=cuda)
    assert done.stdout.split() == ["NCCL", str(cuda), f"{wheel}/include"]
    assert (tmp_path / "nccl" / "libnccl.so").resolve() == wheel / "lib" / "libnccl.so.2"


def test_without_nccl_horovod_is_told_nothing_of_it(tmp_path: Path) -> None:
    pytorch(tmp_path, "'13.0'")
    code = f'KIND=host\nprepare_gpu_build {tmp_path}\necho "${{HOROVOD_GPU_OPERATIONS:-nothing}}"'
    done = functions(tmp_path, code, CUDA_HOME=toolkit(tmp_path / "cuda"), HOROVOD_GPU_OPERATIONS="NCCL")
    assert done.stdout.strip() == "nothing"


# ---- TensorFlow -----------------------------------------------------------------------------------------------------

HOROVOD = """
cmake_minimum_required(VERSION 3.20)
project(horovod NONE)
set(SOURCES /horovod/common/common.cc)
foreach(name cuda gpu mpi gloo nccl mpi_gpu adasum_gpu adasum_mpi)
    list(APPEND SOURCES /horovod/common/ops/${name}_operations.cc)
endforeach()
set(LINKER_LIBS /lib/libmpi.so /wheel/libnccl.so)
set(HAVE_CUDA TRUE)
add_definitions(-DHAVE_GLOO=1 -DHAVE_CUDA=1 -DHAVE_GPU=1 -DHAVE_NCCL=1 -DHOROVOD_GPU_ALLREDUCE=78)
add_subdirectory(tensorflow)
add_subdirectory(torch)
"""

LIBRARY = """
get_directory_property(DEFINITIONS COMPILE_DEFINITIONS)
get_filename_component(folder ${CMAKE_CURRENT_SOURCE_DIR} NAME)
file(WRITE ${CMAKE_SOURCE_DIR}/${folder}.txt "${DEFINITIONS}\n${SOURCES}\n${LINKER_LIBS}\n${HAVE_CUDA}\n")
"""


def test_tensorflow_is_left_without_cuda(tmp_path: Path) -> None:
    cmake = Path(sys.executable).with_name("cmake")
    if not cmake.exists():
        pytest.skip(f"{cmake} is missing, which scripts/setup installs")
    (tmp_path / "CMakeLists.txt").write_text(HOROVOD)
    for framework in ("tensorflow", "torch"):
        (tmp_path / framework).mkdir()
        (tmp_path / framework / "CMakeLists.txt").write_text(LIBRARY)
    assert (
        functions(tmp_path, f"keep_tensorflow_on_host {tmp_path}/tensorflow/CMakeLists.txt").returncode == 0
    )
    configured = run([str(cmake), "-S", str(tmp_path), "-B", str(tmp_path / "build")])
    assert configured.returncode == 0, configured.stdout
    definitions, sources, libraries, cuda = (tmp_path / "tensorflow.txt").read_text().splitlines()
    assert definitions == "HAVE_GLOO=1"
    names = [Path(source).name for source in sources.split(";")]
    assert names == [
        "common.cc", "mpi_operations.cc", "gloo_operations.cc", "adasum_mpi_operations.cc"
    ]  # fmt: skip
    assert (libraries, cuda) == ("/lib/libmpi.so", "FALSE")
    in_torch = (tmp_path / "torch.txt").read_text()
    assert all(name in in_torch for name in ("HAVE_NCCL=1", "HOROVOD_GPU_ALLREDUCE=78", "libnccl", "TRUE"))


@pytest.mark.parametrize(
    "files", [("constraints.txt", "constraints-gpu.txt"), ("constraints-gpu-check.txt",)]
)
def test_nothing_is_pinned_twice(files: tuple[str, ...]) -> None:
    lines = [line for file in files for line in (ROOT / "scripts" / file).read_text().splitlines()]
    names = [line.partition("==")[0].lower() for line in lines if "==" in line]
    assert len(names) == len(set(names))
