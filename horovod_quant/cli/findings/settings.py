"""Findings about Horovod's settings that matter for quantization."""

from __future__ import annotations

import re
from collections.abc import Mapping

from horovod_quant.analysis.cost_model import CONTROL_BYTES, FUSION_BYTES
from horovod_quant.analysis.groups import compressed_names, tensorflow_cache_names, torch_cache_names
from horovod_quant.analysis.models import MODELS, elements
from horovod_quant.cli.probe import FRAMEWORKS
from horovod_quant.cli.report import OK, WARNING, Finding
from horovod_quant.frontends import switch
from horovod_quant.frontends.methods import examples

# Horovod 0.28.1: operations.cc.
DEFAULT_CACHE, DEFAULT_CYCLE = 1024, 1.0

LONG_CYCLE = 5.0
"""Milliseconds from which waiting for cycles takes much of a short step."""


def findings(environment: Mapping[str, str], model: str | None, frameworks: list[str]) -> list[Finding]:
    """Return findings about Horovod's settings that matter for quantization.

    Args:
        environment: environment variables.
        model: the model whose gradients are reduced, if known.
        frameworks: frameworks that may reduce them.
    """
    checked = [
        cache_finding(environment, model, frameworks),
        fusion_finding(environment, model),
        cycle_finding(environment),
    ]
    found = [finding for finding in checked if finding is not None]
    if environment.get(switch.VARIABLE, "").strip() == "1":
        text = f"{switch.VARIABLE}=1: Horovod reduces all gradients, uncompressed"
        found.append(Finding(WARNING, text, "unset it"))
    if number(environment, "HOROVOD_AUTOTUNE", 0)[0] > 0:
        found.append(
            Finding(
                WARNING,
                "HOROVOD_AUTOTUNE tries fusion thresholds, cycle times and disabling the cache during training",
                "unset it once it has found its values: it overrides these settings and disturbs every measurement",
            )
        )
    suits = f"Horovod's cache, fusion buffer and cycle time suit {model or 'compressed gradients'}"
    return found or [Finding(OK, suits)]


def cache_finding(environment: Mapping[str, str], model: str | None, frameworks: list[str]) -> Finding | None:
    capacity, text = number(environment, "HOROVOD_CACHE_CAPACITY", DEFAULT_CACHE)
    if capacity <= 0:
        return Finding(
            WARNING,
            f"{text}: no response cache, so the workers negotiate every collective again",
            "unset it",
        )
    if model is None:
        return None
    needs = {
        FRAMEWORKS[name]: max(
            (torch_cache_names if name == "torch" else tensorflow_cache_names)(scheme, MODELS[model])
            for scheme in examples().values()
        )
        for name in frameworks
    }
    shown = ", ".join(f"{names:,} in {framework}" for framework, names in needs.items())
    text = f"{text} names: a step of {model} has up to {shown}"
    most = max(needs.values())
    if most > capacity:
        enough = max(DEFAULT_CACHE, 1 << (most - 1).bit_length())
        return Finding(
            WARNING,
            f"{text}, more than the cache holds, so they are renegotiated every step",
            f"set HOROVOD_CACHE_CAPACITY={enough} (horovodrun --cache-capacity {enough})",
        )
    return None


def fusion_finding(environment: Mapping[str, str], model: str | None) -> Finding | None:
    threshold, text = number(environment, "HOROVOD_FUSION_THRESHOLD", FUSION_BYTES)
    what, together = "small gradients", 2**20
    if model is not None:
        shapes = MODELS[model]
        compressed = set(compressed_names(next(iter(examples().values())), shapes))
        small = {name: shape for name, shape in shapes.items() if name not in compressed}
        together = 4 * elements(small) + CONTROL_BYTES * len(compressed)
        what = (
            f"{model}'s {len(small)} small gradients, with Horovod's other small tensors {together:,} bytes,"
        )
    if threshold < together:
        return Finding(
            WARNING, f"{text} bytes: {what} cannot all be fused, and each part costs time", "unset it"
        )
    return None


def cycle_finding(environment: Mapping[str, str]) -> Finding | None:
    cycle, text = number(environment, "HOROVOD_CYCLE_TIME", DEFAULT_CYCLE)
    deepest = max(len(scheme.collectives) for scheme in examples().values())
    if cycle <= 0:
        return Finding(
            WARNING,
            f"{text} ms: no pause between cycles, which costs the kernels CPU time",
            "unset it, or set it to 1",
        )
    if cycle > LONG_CYCLE:
        return Finding(
            WARNING,
            f"{text} ms: a compressed reduction waits for 1 to {deepest} cycles, up to {deepest * cycle:g} ms per step",
            "unset it, or set it to 1",
        )
    return None


def number(environment: Mapping[str, str], name: str, default: float) -> tuple[float, str]:
    """Return a setting's leading number, and its text.

    Without a number it is 0, as in Horovod.
    """
    given = environment.get(name)
    if given is None:
        return default, f"{name}={default:g}" if default < 1e5 else f"{name}={default:.0f}"
    digits = re.match(r"\s*[-+]?(\d+(\.\d*)?|\.\d+)", given)
    if digits is None:
        return 0.0, f"{name}={given!r}, which Horovod reads as 0"
    return float(digits[0]), f"{name}={given.strip()}"
