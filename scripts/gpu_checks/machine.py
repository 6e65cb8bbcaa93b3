"""Describe the machine, and check that its GPU can be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

PROBE = """
import importlib, json, platform, sys
found = {"python": platform.python_version(), "missing": [], "gpu": None}
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
        found[name] = str(getattr(module, "__version__", "there"))
    except ImportError as error:
        found["missing"].append(f"{name} ({error})")
try:
    import torch
    found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found.update(gpu=properties.name, gpus=torch.cuda.device_count(), gpu_bytes=properties.total_memory,
                     multiprocessors=properties.multi_processor_count)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    found["problem"] = f"{type(error).__name__}: {error}"
try:
    from horovod_quant.kernels import native
    found["native kernels"] = "there"
except Exception as error:
    found["native kernels"] = f"missing, which ranks with other kernels need: {error}"
print(json.dumps(found))
"""

NEEDED = ("numpy", "torch", "triton", "pytest", "xdist", "hypothesis", "rich")
FOR_HOROVOD = ("psutil", "cloudpickle", "yaml", "tqdm")


def describe(runner: Any) -> str | None:
    """Put the machine and its versions into the report.

    Returns:
        Why nothing can be checked here, and what would help; None if all is well.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *NEEDED, *FOR_HOROVOD],
        capture_output=True,
        text=True,
        env=runner.environment,
    )
    if done.returncode:
        return f"{sys.executable} does not run: {done.stderr[-500:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    found.update(cores=len(os.sched_getaffinity(0)), processor=processor(), driver=driver(), commit=commit())
    runner.report.data["machine"] = found
    missing = [text for text in found["missing"] if text.split()[0] in NEEDED]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)}; set PYTHON to one that has {', '.join(NEEDED)}"
    if not runner.rehearse and found["gpu"] is None:
        detail = found.get("problem", "torch.cuda.is_available() is false")
        return f"PyTorch {found['torch']} sees no GPU ({detail}); --rehearse does without one"
    return None


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def driver() -> str | None:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def commit() -> str | None:
    """Return the tree's commit, or None if files differ from it."""
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", empty="nothing")
    return _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") if changed == "nothing" else None


def _output(*command: str, empty: str | None = None) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] or empty if done.returncode == 0 else None
