"""Findings about installed versions, and Horovod's build."""

from __future__ import annotations

import platform
import re
import shutil
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from horovod_quant import __version__
from horovod_quant.cli import probe
from horovod_quant.cli.probe import FRAMEWORKS
from horovod_quant.cli.report import NOTE, OK, PROBLEM, WARNING, Finding
from horovod_quant.frontends.installing import install_page
from horovod_quant.schemes import registry

TESTED_HOROVOD = "0.28.1"

BUILD_FLAGS = {"torch": "HOROVOD_WITH_PYTORCH=1", "tensorflow": "HOROVOD_WITH_TENSORFLOW=1"}


def is_usable(facts: Mapping[str, Any]) -> bool:
    """Check the framework's frontend without starting Horovod."""
    return facts.get("stage") in ("run", "done")


def findings(facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    found = [
        Finding(
            OK,
            f"horovod-quant {__version__}, Python {platform.python_version()}, numpy {np.__version__}, "
            f"{platform.system()} {platform.machine()}",
        ),
        *scheme_findings(),
        horovod_finding(facts),
    ]
    has_horovod = probe.horovod_folder() is not None
    if len(facts) > 1 and all(own.get("missing") for own in facts.values()):
        names, packages = (
            " or ".join(each(name) for name in facts) for each in (FRAMEWORKS.__getitem__, str)
        )
        text = f"which framework do you train with? {names} is not installed"
        return [*found, Finding(PROBLEM, text, f"pip install {packages}, then build Horovod with it")]
    usable = any(map(is_usable, facts.values()))
    for name, own in facts.items():
        found += framework_findings(name, own, has_horovod, usable)
    return found


def scheme_findings() -> list[Finding]:
    """Return findings about schemes of other packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the findings have the same text
        others = [kind for kind in registry.registered() if not registry.is_own(kind)]
    shown = ", ".join(f"{kind.__name__} of {kind.__module__}" for kind in others)
    problems = [Finding(PROBLEM, text, "repair or remove its package") for text in registry.problems()]
    return [*([Finding(OK, f"schemes of other packages: {shown}")] if others else []), *problems]


def horovod_finding(facts: Mapping[str, Mapping[str, Any]]) -> Finding:
    if probe.horovod_folder() is None:
        flags = " ".join(BUILD_FLAGS[name] for name in facts)
        remedy = f"build it with {flags}, using the commands in {install_page()}"
        if facts.get("torch", {}).get("distributed"):
            return Finding(NOTE, "Horovod is not installed: DDP and FSDP2 work without it", f"or {remedy}")
        return Finding(
            PROBLEM, "Horovod is not installed: only the simulator and reductions over mpi4py work", remedy
        )
    version = probe.version_of("horovod") or "of unknown version"
    build = next((own["built"] for own in facts.values() if "built" in own), None)
    if build is None:
        return Finding(
            NOTE,
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
            PROBLEM, text, "rebuild Horovod with HOROVOD_WITH_GLOO=1 (needs cmake) or HOROVOD_WITH_MPI=1"
        )
    if shutil.which("horovodrun") is None:
        return Finding(
            WARNING, f"{text}; horovodrun is not on PATH", "activate the environment that Horovod is in"
        )
    if version != TESTED_HOROVOD:
        return Finding(
            WARNING,
            f"{text}; horovod-quant is tested with {TESTED_HOROVOD} and depends on its internals",
            f"use {TESTED_HOROVOD}, or run the tests of horovod-quant with yours",
        )
    return Finding(OK, text)


def framework_findings(name: str, facts: Mapping[str, Any], has_horovod: bool, usable: bool) -> list[Finding]:
    """Return findings about a framework.

    It may be missing if another is ``usable``.
    """
    shown = FRAMEWORKS[name]
    error, stage = facts.get("error"), facts.get("stage")
    rebuild = f"rebuild Horovod with {BUILD_FLAGS[name]}, using the commands in {install_page()},"
    if facts.get("missing"):
        return [
            Finding(
                NOTE if usable else PROBLEM,
                f"{shown} is not installed",
                f"pip install {name} if you train with it, before Horovod",
            )
        ]
    if "version" not in facts:
        return [Finding(PROBLEM, f"{shown} cannot be imported: {error}", "install it again")]
    text = f"{shown} {facts['version']}{gpus(facts)}"
    doors = ", under DDP and FSDP2 (torchrun) too" if facts.get("distributed") else ""
    if not has_horovod:
        return [Finding(OK, text)]
    if not facts.get("library"):
        return [
            Finding(
                NOTE if usable else PROBLEM,
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
        findings = [Finding(OK, f"{text}: Horovod and horovod_quant.{name} work with it{doors}")]
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
        fallback = "use horovod_quant.keras.DistributedOptimizer, or DistributedGradientTape"
        return Finding(WARNING, f"Keras {keras}: {facts.get('keras_3_remedy', fallback)}")
    if standalone and major(standalone) >= 3:
        return Finding(
            WARNING,
            f"tf.keras is Keras {keras}, with which horovod.tensorflow.keras averages gradients; horovod.keras uses "
            f"Keras {standalone}, and does not",
            "import horovod.tensorflow.keras",
        )
    return Finding(
        OK, f"Keras {keras}: Horovod's optimizers average its gradients (under Keras 3 they would not)"
    )


def major(version: str) -> int:
    digits = re.match(r"\d+", version)
    return int(digits[0]) if digits else 0
