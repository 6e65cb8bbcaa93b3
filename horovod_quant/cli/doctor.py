"""What is installed, which kernels run, whether Horovod's collectives are exact, and what to do about it.

    horovod-quant doctor                          what can be seen without starting Horovod
    horovodrun -np 2 horovod-quant doctor         the collectives, too: controller, exactness of integer allreduces
    horovod-quant doctor --model bert-base        Horovod's settings for this model

Each finding is one line: ok, warning (works, but slowly or only in part) or problem. The exit status is 1 if there is a
problem. Under horovodrun rank 0 prints.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from horovod_quant import __version__, kernels
from horovod_quant.analysis.groups import compressed_names, tensorflow_cache_names, torch_cache_names
from horovod_quant.analysis.models import MODELS, Shapes, elements
from horovod_quant.cli import probe, report
from horovod_quant.cli.probe import FRAMEWORKS
from horovod_quant.cli.report import OK, PROBLEM, WARNING, Finding, Section
from horovod_quant.kernels import native, reference
from horovod_quant.kernels.keys import KeyChain
from horovod_quant.schemes import NUQSGD, QSGD, BinSGDM, GlobalQSGD

TESTED_HOROVOD = "0.28.1"

BUILD_FLAGS = {"torch": "HOROVOD_WITH_PYTORCH=1", "tensorflow": "HOROVOD_WITH_TENSORFLOW=1"}

# Horovod 0.28.1: operations.cc.
DEFAULT_CACHE, DEFAULT_FUSION, DEFAULT_CYCLE = 1024, 128 * 2**20, 1.0

LONG_CYCLE = 5.0
"""Milliseconds; from here on waiting for cycles is a good part of a short step."""

SCHEMES = (GlobalQSGD(8), GlobalQSGD(4, levels="exponential"), QSGD(4), NUQSGD(4), BinSGDM())
"""Between them as few and as many collectives as there are."""

# How a launcher tells a worker its rank and the number of workers.
_LAUNCHERS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


class Place(NamedTuple):
    """This process among the workers; ``size`` 0 where no launcher has started it."""

    rank: int
    size: int
    gloo: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, help="whose gradients the settings are judged for")
    parser.add_argument(
        "--framework",
        choices=FRAMEWORKS,
        help="look at this one alone (under MPI, one at a time can be tested)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="for each framework; default: %(default)g",
    )


def run(arguments: argparse.Namespace) -> int:
    """The command; returns 1 if there is a problem."""
    place = find_place(os.environ)
    wanted = [arguments.framework] if arguments.framework else list(FRAMEWORKS)
    facts = gather_facts(wanted, place, arguments.timeout)
    if place.rank > 0:
        return 0
    usable = [name for name in facts if is_usable(facts[name])]
    sections = [
        Section("Installed", installed(facts)),
        Section("Kernels", kernel_findings(facts)),
        Section(
            f"Horovod's settings{f' for {arguments.model}' if arguments.model else ''}",
            settings(os.environ, arguments.model, usable or wanted),
        ),
    ]
    if place.size:
        sections.append(Section(f"This run of {place.size}", run_findings(facts, place)))
    report.show(sections, hints(arguments, place, bool(usable)), plain=place.size > 0)
    return int(any(finding.mark == PROBLEM for section in sections for finding in section.findings))


def hints(arguments: argparse.Namespace, place: Place, usable: bool) -> list[str]:
    found = []
    if usable and not place.size:
        found.append("To test the collectives: horovodrun -np 2 horovod-quant doctor")
    if arguments.model is None:
        found.append(f"To judge the settings for a model: --model {'|'.join(MODELS)}")
    return found


def find_place(environment: Mapping[str, str]) -> Place:
    for rank, size in _LAUNCHERS:
        if rank in environment and size in environment:
            gloo = "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environment
            return Place(int(environment[rank]), int(environment[size]), gloo)
    return Place(0, 0, False)


def gather_facts(wanted: list[str], place: Place, timeout: float) -> dict[str, dict[str, Any]]:
    """Facts of each framework.

    Under Gloo every framework is tested, one after another: when an allreduce is done, all workers have left the
    rendezvous that the next one needs. MPI starts once in a launched process and its children: the first framework
    that Horovod has a library for is tested.
    """
    testable = [name for name in wanted if place.size and probe.horovod_library(name)]
    tested = testable if place.gloo else testable[:1]
    facts: dict[str, dict[str, Any]] = {}
    for name in tested:
        facts[name] = probe.ask(name, True, timeout)
        if "error" in facts[name]:
            break  # the workers may no longer be at the same point
    if place.rank == 0:
        rest = [name for name in wanted if name not in facts]
        with ThreadPoolExecutor() as pool:
            facts.update(zip(rest, pool.map(lambda name: probe.ask(name, False, timeout), rest)))
    return {name: facts[name] for name in wanted if name in facts}


def is_usable(facts: Mapping[str, Any]) -> bool:
    """Whether the framework's frontend works, as far as can be seen without starting Horovod."""
    return facts.get("stage") in ("run", "done")


# ---- what is installed ----------------------------------------------------------------------------------------------


def installed(facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    findings = [
        Finding(
            OK,
            f"horovod-quant {__version__}, Python {platform.python_version()}, numpy {np.__version__}, "
            f"{platform.system()} {platform.machine()}",
        ),
        horovod_finding(facts),
    ]
    has_horovod = probe.horovod_folder() is not None
    usable = any(map(is_usable, facts.values()))
    for name, own in facts.items():
        findings += framework_findings(name, own, has_horovod, usable)
    return findings


def horovod_finding(facts: Mapping[str, Mapping[str, Any]]) -> Finding:
    if probe.horovod_folder() is None:
        flags = " ".join(BUILD_FLAGS[name] for name in facts)
        return Finding(
            PROBLEM,
            "Horovod is not installed: nothing but the simulator and the exchange over mpi4py works",
            f"{flags} pip install --no-cache-dir --no-build-isolation horovod, or scripts/setup",
        )
    version = probe.version_of("horovod") or "of unknown version"
    build = next((own["built"] for own in facts.values() if "built" in own), None)
    if build is None:
        return Finding(
            WARNING,
            f"Horovod {version}: no framework's library could be loaded to ask what it was built with",
            "see below",
        )
    names = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL", "ccl": "oneCCL", "ddl": "DDL"}
    controllers = [names[kind] for kind in ("mpi", "gloo") if build[kind]]
    text = f"Horovod {version}, built with {' and '.join(controllers) or 'no controller'}"
    others = [names[kind] for kind in ("nccl", "ccl", "ddl") if build[kind]]
    text += f" and {' and '.join(others)}" if others else ", for CPUs (no NCCL)"
    if not controllers:
        return Finding(
            PROBLEM, text, "build Horovod again with HOROVOD_WITH_GLOO=1 (needs cmake) or HOROVOD_WITH_MPI=1"
        )
    if shutil.which("horovodrun") is None:
        return Finding(
            WARNING, f"{text}; horovodrun is not on PATH", "activate the environment that Horovod is in"
        )
    if version != TESTED_HOROVOD:
        return Finding(
            WARNING,
            f"{text}; horovod-quant is tested with {TESTED_HOROVOD} and looks at its insides",
            f"take {TESTED_HOROVOD}, or run the tests of horovod-quant with yours",
        )
    return Finding(OK, text)


def framework_findings(name: str, facts: Mapping[str, Any], has_horovod: bool, usable: bool) -> list[Finding]:
    """``usable``: whether some framework is, so that this one may well be unwanted."""
    shown = FRAMEWORKS[name]
    error, stage = facts.get("error"), facts.get("stage")
    rebuild = f"{BUILD_FLAGS[name]} pip install --force-reinstall --no-cache-dir --no-build-isolation horovod"
    if facts.get("missing"):
        return [
            Finding(
                OK if usable else PROBLEM,
                f"{shown} is not installed",
                f"pip install 'horovod-quant[{name}]' if you train with it, before Horovod",
            )
        ]
    if "version" not in facts:
        return [Finding(PROBLEM, f"{shown} cannot be imported: {error}", "install it again")]
    text = f"{shown} {facts['version']}{gpus(facts)}"
    if not has_horovod:
        return [Finding(OK, text)]
    if not facts.get("library"):
        return [
            Finding(
                WARNING if usable else PROBLEM,
                f"{text}: Horovod was built without it (whatever horovodrun --check-build says)",
                f"{rebuild} if you train with it",
            )
        ]
    if "built" not in facts:
        return [Finding(PROBLEM, f"{text}: Horovod's library for it cannot be loaded: {error}", rebuild)]
    if stage == "frontend":
        return [
            Finding(
                PROBLEM,
                f"{text}: horovod_quant.{name} cannot be imported: {error}",
                "install horovod-quant again",
            )
        ]
    if facts.get("built_for") not in (None, facts["version"]):
        findings = [Finding(WARNING, f"{text}: Horovod was built with {shown} {facts['built_for']}", rebuild)]
    else:
        findings = [Finding(OK, f"{text}: Horovod and horovod_quant.{name} work with it")]
    if facts.get("gpus") and not facts["built"]["nccl"]:
        findings.append(
            Finding(
                WARNING,
                f"{shown} sees a GPU, but Horovod was built without NCCL: collectives go through the host's memory",
                f"HOROVOD_GPU_OPERATIONS=NCCL {rebuild}",
            )
        )
    if name == "tensorflow":
        findings.append(keras_finding(facts))
    return findings


def gpus(facts: Mapping[str, Any]) -> str:
    count = facts.get("gpus", 0)
    return f" with {count} GPU{'s' if count > 1 else ''}" if count else " on CPUs"


def keras_finding(facts: Mapping[str, Any]) -> Finding:
    keras, standalone = facts["keras"], facts.get("standalone_keras")
    if major(keras) >= 3:
        fallback = "use tensorflow<2.16, or tf-keras with TF_USE_LEGACY_KERAS=1, or DistributedGradientTape"
        return Finding(PROBLEM, f"Keras {keras}: {facts.get('keras_3_remedy', fallback)}")
    if standalone and major(standalone) >= 3:
        return Finding(
            WARNING,
            f"tf.keras is Keras {keras}, with which horovod.tensorflow.keras averages gradients; horovod.keras takes "
            f"Keras {standalone}, and does not",
            "import the former",
        )
    return Finding(
        OK, f"Keras {keras}: Horovod's optimizers average its gradients (under Keras 3 they would not)"
    )


def major(version: str) -> int:
    digits = re.match(r"\d+", version)
    return int(digits[0]) if digits else 0


# ---- kernels --------------------------------------------------------------------------------------------------------


def kernel_findings(facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    wanted = os.environ.get("HOROVOD_QUANT_KERNELS")
    if wanted in kernels.OWN_OF_FRAMEWORKS:
        what = "TensorFlow operations" if wanted == "tensorflow" else "Triton"
        own = Finding(OK, f"kernels of {what}, asked for by HOROVOD_QUANT_KERNELS; where there are none:")
        return [own, *host_kernel_findings(""), *gpu_kernel_findings(facts)]
    return [*host_kernel_findings(wanted), *gpu_kernel_findings(facts)]


def host_kernel_findings(wanted: str | None) -> list[Finding]:
    """On the kernels for arrays in the host's memory; ``wanted``: those that were asked for."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says is found here
            backend = kernels.get()
        text = kernels.describe()
    except (ImportError, ValueError) as error:
        variables = [name for name in _KERNEL_VARIABLES if os.environ.get(name)]
        return [Finding(PROBLEM, f"no kernels: {error}", f"unset or correct {' and '.join(variables)}")]
    if backend is not native:
        remedy = "unset HOROVOD_QUANT_KERNELS" if wanted else native_remedy()
        return [Finding(WARNING, text, remedy)]
    if not same_bits(native):
        return [
            Finding(
                PROBLEM,
                f"{text}, but they do not return the reference's bits",
                "set HOROVOD_QUANT_KERNELS=numpy and report this",
            )
        ]
    if native.instruction_set() != native.available_instruction_sets()[-1]:
        return [Finding(WARNING, f"{text}, asked for by HOROVOD_QUANT_ISA", "unset it for the fastest")]
    return [Finding(OK, f"{text}; bits as the reference's")]


def gpu_kernel_findings(facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """On the kernels for PyTorch's gradients on a GPU, if there is one."""
    if not facts.get("torch", {}).get("gpus"):
        return []
    if probe.version_of("triton") is None:
        text = "PyTorch's gradients on a GPU are copied to the host, quantized there, and copied back"
        return [Finding(WARNING, text, "pip install triton")]
    text = "PyTorch's gradients on a GPU are quantized there, by kernels in Triton that no GPU has run yet"
    return [Finding(WARNING, text, "measure against hvd.Compression.none before relying on it")]


_KERNEL_VARIABLES = ("HOROVOD_QUANT_KERNELS", "HOROVOD_QUANT_LIBRARY", "HOROVOD_QUANT_ISA")


def native_remedy() -> str:
    if os.environ.get("HOROVOD_QUANT_LIBRARY"):
        return "unset HOROVOD_QUANT_LIBRARY, or let it name a library of this version"
    return "install a C++ compiler, then HOROVOD_QUANT_REQUIRE_NATIVE=1 pip install . where the sources are"


def same_bits(backend: Any) -> bool:
    """Whether a few kernels return on this machine what the reference does."""
    gradient = np.random.default_rng(0).standard_normal(5000, np.float32)
    key = KeyChain(0, "doctor").key("worker", 0)

    def encoded_and_decoded(k: Any) -> list[np.ndarray]:
        norms = k.bucket_maxima(gradient, 1024)
        words = k.encode_uniform_sum(gradient, norms, 1024, 31, 8, key)
        codes = k.encode_exponential(gradient, norms, 1024, 4, key)
        return [
            words,
            codes,
            k.decode_uniform_sum(words, norms, 1024, 31, 8, 0.25, np.empty_like(gradient)),
            k.decode_exponential([codes] * 2, [norms] * 2, 1024, 4, 0.5, np.empty_like(gradient)),
        ]

    return all(map(np.array_equal, encoded_and_decoded(backend), encoded_and_decoded(reference)))


# ---- settings -------------------------------------------------------------------------------------------------------


def settings(environment: Mapping[str, str], model: str | None, frameworks: list[str]) -> list[Finding]:
    """Horovod's settings that matter for quantized exchanges.

    Args:
        environment: with Horovod's variables.
        model: whose gradients are exchanged, if that is known.
        frameworks: that may do it.
    """
    shapes = MODELS[model] if model else None
    findings = [
        cache_finding(environment, model, shapes, frameworks),
        fusion_finding(environment, model, shapes),
        cycle_finding(environment),
    ]
    if number(environment, "HOROVOD_AUTOTUNE", 0)[0] > 0:
        findings.append(
            Finding(
                WARNING,
                "HOROVOD_AUTOTUNE tries fusion thresholds, cycle times and doing without the cache while it trains",
                "unset it once it has found its values: it overrules these settings, and disturbs every measurement",
            )
        )
    return findings


def cache_finding(
    environment: Mapping[str, str], model: str | None, shapes: Shapes | None, frameworks: list[str]
) -> Finding:
    capacity, text = number(environment, "HOROVOD_CACHE_CAPACITY", DEFAULT_CACHE)
    if capacity <= 0:
        return Finding(
            WARNING,
            f"{text}: no response cache, so the workers negotiate every collective anew",
            "unset it",
        )
    if shapes is None:
        return Finding(OK, f"{text} names of collectives are remembered, and not negotiated again")
    needs = {
        FRAMEWORKS[name]: max(
            (torch_cache_names if name == "torch" else tensorflow_cache_names)(scheme, shapes)
            for scheme in SCHEMES
        )
        for name in frameworks
    }
    shown = ", ".join(f"{names:,} in {framework}" for framework, names in needs.items())
    text = f"{text} names: an exchange of {model} has up to {shown}"
    most = max(needs.values())
    if most > capacity:
        enough = max(DEFAULT_CACHE, 1 << (most - 1).bit_length())
        return Finding(
            WARNING,
            f"{text}, which push each other out and are negotiated anew each step",
            f"set HOROVOD_CACHE_CAPACITY={enough} (horovodrun --cache-capacity {enough})",
        )
    return Finding(OK, f"{text}, which fit")


def fusion_finding(environment: Mapping[str, str], model: str | None, shapes: Shapes | None) -> Finding:
    threshold, text = number(environment, "HOROVOD_FUSION_THRESHOLD", DEFAULT_FUSION)
    text += " bytes" if threshold < 2**20 else f" ({threshold / 2**20:g} MiB)"
    if shapes is None:
        if threshold < 2**20:
            return Finding(WARNING, f"{text}: hardly anything is sent together", "unset it")
        return Finding(OK, f"{text}: small gradients and carriers are sent together")
    compressed = compressed_names(SCHEMES[0], shapes)
    small = {name: shape for name, shape in shapes.items() if name not in set(compressed)}
    together = 4 * elements(small) + 68 * len(compressed)
    what = f"{model}'s {len(small)} small gradients and {len(compressed)} carriers ({together:,} bytes)"
    if threshold < together:
        return Finding(
            WARNING, f"{text}: {what} do not go together, and each part takes its time", "unset it"
        )
    return Finding(OK, f"{text}: {what} can go together")


def cycle_finding(environment: Mapping[str, str]) -> Finding:
    cycle, text = number(environment, "HOROVOD_CYCLE_TIME", DEFAULT_CYCLE)
    deepest = max(len(scheme.collectives) for scheme in SCHEMES)
    text = f"{text} ms: how often Horovod looks for new collectives"
    if cycle <= 0:
        return Finding(
            WARNING,
            f"{text}, that is without a pause, which takes CPU time from the kernels",
            "unset it, or set 1",
        )
    text += f", of which a quantized exchange has 1 to {deepest} in a row"
    if cycle > LONG_CYCLE:
        return Finding(WARNING, f"{text}, up to {deepest * cycle:g} ms a step", "unset it, or set 1")
    return Finding(OK, text)


def number(environment: Mapping[str, str], name: str, default: float) -> tuple[float, str]:
    """A setting as Horovod reads it, and how to show it: it takes the number at the beginning, 0 if there is none."""
    given = environment.get(name)
    if given is None:
        return default, f"{name}={default:g}" if default < 1e5 else f"{name}={default:.0f}"
    digits = re.match(r"\s*[-+]?(\d+(\.\d*)?|\.\d+)", given)
    if digits is None:
        return 0.0, f"{name}={given!r}, which Horovod reads as 0"
    return float(digits[0]), f"{name}={given.strip()}"


# ---- under horovodrun -----------------------------------------------------------------------------------------------


def run_findings(facts: Mapping[str, Mapping[str, Any]], place: Place) -> list[Finding]:
    findings: list[Finding] = []
    started = next((own["run"] for own in facts.values() if "run" in own), None)
    if started is not None:
        findings += [controller_finding(started, place), *worker_findings(facts)]
    for name, own in facts.items():
        if own.get("library") and "built" in own:
            findings.append(exactness_finding(name, own, place))
    if not findings:
        findings.append(
            Finding(PROBLEM, "no framework that Horovod could be started with", "see the findings above")
        )
    return findings


def controller_finding(started: Mapping[str, Any], place: Place) -> Finding:
    controller = "Gloo" if started["gloo"] and not started["mpi"] else "MPI"
    if started["gloo"] and started["mpi"]:
        controller = "MPI, with Gloo for the collectives or the controller"
    if started["size"] != place.size:
        return Finding(
            PROBLEM,
            f"the controller is {controller}, and Horovod sees {started['size']} workers, not {place.size}",
            "start with horovodrun --gloo, or an mpirun of the MPI that Horovod was built with",
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = (
        f"the controller is {controller}; {started['local_size']} of {started['size']} workers on this host, "
        f"which has {cores} core{'s' if cores > 1 else ''}"
    )
    if started["size"] == 1:
        return Finding(WARNING, f"{text}: one worker exchanges nothing", "start two at least")
    if cores < started["local_size"]:
        return Finding(
            WARNING,
            f"{text}: their times say nothing about a cluster",
            "no more workers than cores, where time matters",
        )
    return Finding(OK, text)


def worker_findings(facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """What differs between the workers."""
    workers = next((own["run"]["workers"] for own in facts.values() if "workers" in own.get("run", {})), None)
    if workers is None:
        return []
    findings = []
    for item in workers[0]:
        if item in ("host", "wrong"):
            continue
        values = {str(worker[item]) for worker in workers}
        if len(values) > 1:
            ranks = [rank for rank, worker in enumerate(workers) if worker[item] != workers[0][item]]
            odd = workers[ranks[0]]
            findings.append(
                Finding(
                    WARNING if item == "kernels" else PROBLEM,
                    f"{item} of worker {ranks[0]} on {odd['host']} ({len(ranks)} such): {odd[item]}, "
                    f"not {workers[0][item]} as on worker 0",
                    "the slowest one sets the pace: install alike" if item == "kernels" else "install alike",
                )
            )
    if not findings:
        hosts = len({worker["host"] for worker in workers})
        findings.append(
            Finding(OK, f"the same versions and kernels on {hosts} host{'s' if hosts > 1 else ''}")
        )
    return findings


def exactness_finding(name: str, facts: Mapping[str, Any], place: Place) -> Finding:
    shown = FRAMEWORKS[name]
    what = f"allreduce of int32 and int64, Sum and Max, through {shown}"
    workers = facts.get("run", {}).get("workers")
    if workers is None and facts.get("stage") == "run":
        return Finding(
            PROBLEM,
            f"{what}: failed ({facts.get('error')})",
            "run horovod-quant doctor without horovodrun on every host; if all is well there, look at the network",
        )
    if workers is None:
        why = "the framework before failed" if place.gloo else "MPI starts only once in a process"
        return Finding(WARNING, f"{what}: not tested, because {why}", f"run again with --framework {name}")
    wrong = {rank: worker["wrong"] for rank, worker in enumerate(workers) if worker["wrong"]}
    if wrong:
        rank, operations = next(iter(wrong.items()))
        return Finding(
            PROBLEM,
            f"{what}: not exact on {len(wrong)} of {len(workers)} workers (worker {rank}: {', '.join(operations)})",
            "GlobalQSGD cannot be used here; try the other controller, or QSGD, NUQSGD or BinSGDM",
        )
    return Finding(OK, f"{what}: exact, sums wrap around modulo 2^32 and 2^64")
