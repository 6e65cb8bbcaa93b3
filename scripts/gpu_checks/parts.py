"""The parts of the check, in the order in which they run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_checks import readers
from gpu_checks.scenarios import ddp as ddp_scenarios
from gpu_checks.scenarios import plan as planned_scenarios
from gpu_checks.steps import Findings, Part, Step

TITLES = {
    "compile": "kernels of the parts speed, host and training are compiled",
    "bits": "one case of each kernel is bit-identical to the reference",
    "speed": "each kernel beside a device copy",
    "host": "time in hooks and launches of an exchange",
    "exchange": "exchanges of small models are bit-identical to the simulator",
    "ddp": "DDP's gradients are bit-identical to the simulator's",
    "training": "trainings of the character transformer",
    "all-bits": "all tests of the kernels' bits",
}
ROOT = Path(__file__).resolve().parents[2]
KERNEL_TESTS = sorted(map(str, (ROOT / "tests" / "kernels").glob("test_triton*.py")))
TWO = ("--gloo", "-np", "2", "-H", "localhost:2")
ONE = ("--gloo", "-np", "1", "-H", "localhost:1")
STAGED = {"HOROVOD_QUANT_STAGING": "1"}


class Size(NamedTuple):
    """Sizes of the parts.

    Attributes:
        processes: number of processes of pytest-xdist.
        device: device of the benchmarks and trainings.
        extended: True to add the tests of --all to the last part.
        sizes: sizes of the gradients in benchmarks/kernels.py.
        rounds: number of rounds of each benchmark.
        models: options of benchmarks/exchange.py that select the gradients to average, by the model's name.
        methods: methods that benchmarks/exchange.py measures.
        features: features of test_gpu_exchange.py whose scenarios run; None for all of the default tier.
        ddp: number of DDP scenarios; None for all.
        training: options of the training.
    """

    processes: int
    device: str
    extended: bool
    sizes: Sequence[str]
    rounds: int
    models: dict[str, Sequence[str]]
    methods: Sequence[str]
    features: Sequence[str] | None
    ddp: int | None
    training: Sequence[str]


CARD = Size(
    processes=10,
    device="cuda",
    extended=True,
    sizes=["1M", "25M", "100M"],
    rounds=5,
    models={"ResNet-50": ["--model", "resnet50"], "BERT-base": ["--model", "bert-base"]},
    methods=["none", "global-qsgd-8", "qsgd-4", "eden-3", "binsgdm"],
    features=None,
    ddp=None,
    training=["--steps", "60", "--layers", "8", "--width", "512", "--heads", "8", "--context", "256",
              "--batch-size", "64"],
)  # fmt: skip
REHEARSAL = Size(
    processes=2,
    device="interpreter",
    extended=False,
    sizes=["4k"],
    rounds=1,
    models={"2 gradients": ["--many-small", "2"]},
    methods=["none", "global-qsgd-8", "eden-3", "binsgdm"],
    features=["overlapped", "direct_calls"],
    ddp=2,
    training=["--steps", "2", "--layers", "1", "--width", "32", "--heads", "2", "--context", "16",
              "--batch-size", "4"],
)  # fmt: skip

TRAININGS = {
    "none": ["--compression", "none", "--lr", "0.0006"],
    "GlobalQSGD-8": ["--compression", "global-qsgd", "--bits", "8", "--lr", "0.0006"],
    "EDEN-3": ["--compression", "eden", "--bits", "3", "--lr", "0.0006"],
    "BinSGDM": ["--compression", "binsgdm", "--lr", "0.0005"],
}


def plan(work: Path, rehearse: bool) -> list[Part]:
    """Return all parts.

    Args:
        work: folder for their results.
        rehearse: whether Triton's interpreter replaces the GPU.
    """
    size = REHEARSAL if rehearse else CARD
    return [
        compiling(size),
        bits(work, size),
        speed(work, size),
        host(work, size),
        exchange(work, size),
        ddp(work, size),
        training(work, size),
        all_bits(work, size),
    ]


def compiling(size: Size) -> Part:
    """Compile in parallel, so that other parts find kernels in Triton's cache."""
    command = [sys.executable, "scripts/compile_kernels.py"]
    if size is REHEARSAL:
        command += ["--only", "eden-3", "--models", "resnet50"]
    return Part("compile", [Step("all kernels", command, 20, Findings)])


def bits(work: Path, size: Size) -> Part:
    step = tests(work / "bits.jsonl", size, "one case of each", ["-k", "not benchmark"], weight=40)
    return Part("bits", [step._replace(environment={**step.environment, "GPU_CHECK_CASES": "first"})])


def all_bits(work: Path, size: Size) -> Part:
    steps = [tests(work / "all-bits.jsonl", size, "those of each change", [], 10)]
    if size.extended:
        options = ["--all", "-m", "extended"]
        steps.append(tests(work / "more-bits.jsonl", size, "those of --all", options, 5))
    return Part("all-bits", steps)


def tests(results: Path, size: Size, name: str, options: Sequence[str], weight: float) -> Step:
    return Step(
        name,
        [sys.executable, "-m", "pytest", *KERNEL_TESTS, "-p", "no:cacheprovider", "-p", "gpu_checks.outcomes", "-q",
         "-n", str(size.processes), "--dist", "worksteal", *options],
        weight,
        functools.partial(readers.outcomes, results, name),
        environment={"GPU_CHECK_OUTCOMES": str(results)},
    )  # fmt: skip


def speed(work: Path, size: Size) -> Part:
    results = work / "speed.json"
    command = [sys.executable, "benchmarks/kernels.py", "--device", size.device, "--sizes", *size.sizes,
               "--rounds", str(size.rounds), "--json", str(results)]  # fmt: skip
    read = functools.partial(readers.speed, results, size.sizes)
    return Part("speed", [Step(", ".join(size.sizes), command, 35, read)])


def host(work: Path, size: Size) -> Part:
    steps = []
    for staged in (False, True):
        for number, (model, options) in enumerate(size.models.items()):
            results = work / f"host-{'staged' if staged else 'direct'}-{number}.json"
            program = ["benchmarks/exchange.py", "--device", size.device, *options, "--methods", *size.methods,
                       "--rounds", str(size.rounds), "--json", str(results)]  # fmt: skip
            command = under_horovod(TWO, program) if staged else [sys.executable, *program]
            name = f"{model}, {'two workers, staged' if staged else 'one worker'}"
            read = functools.partial(readers.exchange, results, name)
            kind, variables = ("host", STAGED) if staged else ("nccl", {})
            steps.append(Step(name, command, 18, read, kind, variables))
    return Part("host", steps)


def exchange(work: Path, size: Size) -> Part:
    steps = []
    for label, names in planned_scenarios(size.features).items():
        staged = label == "staged"
        folder = work / f"exchange-{label}"
        folder.mkdir()
        (folder / "names").write_text("\n".join(names))
        name = f"{label}, {'two workers' if staged else 'one worker'}"
        program = ["tests/parallel/worker.py", str(folder), "torch_gpu_scenarios"]
        read = functools.partial(readers.scenarios, folder, name, names, 2 if staged else 1)
        variables = {"EVERY_CASE": "0", "HOROVOD_QUANT_STAGING": "1" if staged else "0"}
        command = under_horovod(TWO if staged else ONE, program)
        steps.append(Step(name, command, 18 if staged else 14, read, "host" if staged else "nccl", variables))
    return Part("exchange", steps)


def ddp(work: Path, size: Size) -> Part:
    names, steps = ddp_scenarios()[: size.ddp], []
    nccl = size.device == "cuda"
    for name, workers, backend in (("one worker", 1, "nccl" if nccl else "gloo"), ("two workers", 2, "gloo")):
        folder = work / f"ddp-{workers}"
        folder.mkdir()
        name = f"{name}, {backend}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}",
                   "tests/ddp/worker.py", str(folder), "ddp_scenarios", *names]  # fmt: skip
        read = functools.partial(readers.scenarios, folder, name, names, workers)
        steps.append(Step(name, command, 12, read, environment={"DDP_BACKEND": backend}))
    return Part("ddp", steps)


def training(work: Path, size: Size) -> Part:
    device = "cuda" if size.device == "cuda" else "cpu"
    steps = []
    for number, (name, options) in enumerate(TRAININGS.items()):
        results = work / f"training-{number}.json"
        program = ["examples/torch_char_transformer.py", "--device", device, *size.training, *options, "--quiet",
                   "--json", str(results)]  # fmt: skip
        read = functools.partial(readers.training, results, name)
        steps.append(Step(name, under_horovod(TWO, program), 26, read, "host", STAGED))
    return Part("training", steps)


def under_horovod(options: Sequence[str], program: Sequence[str]) -> list[str]:
    return [sys.executable, "tests/parallel/horovodrun.py", *options, sys.executable, *program]
