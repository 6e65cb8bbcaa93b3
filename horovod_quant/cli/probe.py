"""Probe of one framework in a separate process, as Horovod's libraries require.

It prints its facts as JSON after each step, so that a crash leaves the earlier ones. ``--run`` initializes Horovod and
tests its integer allreduce; horovodrun must have started all workers then.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

import horovod_quant
from horovod_quant import kernels

MARK = "HOROVOD_QUANT_FACTS "

FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}

SHORT, LONGEST, LONG_SECONDS = 2**18, 2**24, 0.2
"""Minimum and maximum elements of timed allreduces, and seconds that suffice."""

ELEMENTS = 10_007
"""Elements of each tested tensor, a prime number."""


def horovod_folder() -> str | None:
    """Return the folder of Horovod; None if it is not installed."""
    try:
        spec = importlib.util.find_spec("horovod")
    except (ImportError, ValueError):
        return None
    return next(iter(spec.submodule_search_locations or ()), None) if spec is not None else None


def horovod_library(framework: str) -> str | None:
    """Return the path of Horovod's compiled library for a framework, or None.

    Its presence is the only reliable sign: ``import horovod.torch`` succeeds without it, with a printed warning, and
    so ``horovodrun --check-build`` lists PyTorch then, too.
    """
    folder = horovod_folder()
    found = glob.glob(os.path.join(glob.escape(folder), framework, "mpi_lib*.so")) if folder else []
    return found[0] if found else None


def built_for(framework: str) -> str | None:
    """Return the framework's version in Horovod's build metadata, or None."""
    try:
        with open(os.path.join(horovod_folder() or "", "metadata.json")) as file:
            return json.load(file).get({"torch": "pytorch"}.get(framework, framework))
    except (OSError, ValueError):
        return None


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


_CHILD = "import sys; sys.path[:] = {!r}; import runpy; runpy.run_module('horovod_quant.cli.probe', None, '__main__')"
"""Program of the new process: ``-m`` would import modules of the current folder, perhaps another user's."""


# ---- the parent's side -----------------------------------------------------------------------------------------------


def ask(framework: str, run: bool, timeout: float) -> dict[str, Any]:
    """Probe a framework in a new process.

    Return its facts, with ``error`` if it failed.
    """
    command = [sys.executable, "-c", _CHILD.format(sys.path), framework, *(["--run"] if run else [])]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=timeout,
        )
        output, errors, status = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as expired:
        output, errors, status = expired.stdout or b"", expired.stderr or b"", None
    facts: dict[str, Any] = {"framework": framework, "stage": "start"}
    for line in output.decode(errors="replace").splitlines():
        if MARK in line:
            facts = json.loads(line.partition(MARK)[2])
    if status is None:
        facts["error"] = f"no answer within {timeout:g} seconds"
    elif status != 0 and "error" not in facts:
        said = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        facts["error"] = f"{how}: {said[-1].strip()}" if said else how
    return facts


# ---- the child's side ------------------------------------------------------------------------------------------------


class Probe:
    """Steps of a probe; each prints its name, then adds facts."""

    def __init__(self, framework: str) -> None:
        self.facts: dict[str, Any] = {"framework": framework}
        self._framework: Any = None
        self._hvd: Any = None

    def tell(self) -> None:
        print(MARK + json.dumps(self.facts), flush=True)

    def step(self, name: str, action: Callable[[], None]) -> bool:
        self.facts["stage"] = name
        self.tell()
        try:
            action()
        except Exception as error:  # any error of an installation is a finding
            text = " ".join(str(error).split()) or "no message"
            self.facts["error"] = f"{type(error).__name__}: {text}"
            self.facts["missing"] = isinstance(error, ModuleNotFoundError) and error.name == self.name
        self.tell()
        return "error" not in self.facts

    @property
    def name(self) -> str:
        return self.facts["framework"]

    def look(self, run: bool) -> None:
        steps = {"framework": self.import_framework, "library": self.find_library}
        steps.update({"horovod": self.import_horovod, "frontend": self.import_frontend})
        if run:
            steps["run"] = self.run
        for name, action in steps.items():
            if not self.step(name, action) or (name == "library" and not self.facts["library"]):
                return
        self.facts["stage"] = "done"
        self.tell()

    def import_framework(self) -> None:
        self._framework = importlib.import_module(self.name)
        self.facts["version"] = str(self._framework.__version__)
        if self.name == "torch":
            self.facts["gpus"] = self._framework.cuda.device_count()
            self.facts["distributed"] = self._framework.distributed.is_available()
        else:
            self.facts["gpus"] = len(self._framework.config.list_physical_devices("GPU"))
            standalone = version_of("keras")
            is_legacy = standalone is not None and standalone.startswith("3")
            two = version_of("tf-keras") if is_legacy else standalone
            # Only Keras 3 has its version there.
            self.facts["keras"] = str(getattr(self._framework.keras, "__version__", two or "2"))
            self.facts["standalone_keras"] = standalone

    def find_library(self) -> None:
        self.facts["library"] = horovod_library(self.name)
        self.facts["built_for"] = built_for(self.name)

    def import_horovod(self) -> None:
        self._hvd = importlib.import_module(f"horovod.{self.name}")
        kinds = ("mpi", "gloo", "nccl", "ccl", "ddl", "cuda", "rocm")
        self.facts["built"] = {kind: bool(getattr(self._hvd, f"{kind}_built")()) for kind in kinds}

    def import_frontend(self) -> None:
        importlib.import_module(f"horovod_quant.{self.name}")
        if self.name == "tensorflow":
            from horovod_quant.tensorflow.horovod_call import KERAS_3_REMEDY

            self.facts["keras_3_remedy"] = KERAS_3_REMEDY

    # ---- under horovodrun ----------------------------------------------------------------------------------------

    def run(self) -> None:
        if self.name == "tensorflow":
            self._framework.config.set_visible_devices([], "GPU")  # or it takes all of their memory
        else:
            self._framework.set_num_threads(1)
        hvd = self._hvd
        hvd.init()
        self.facts["run"] = {
            "size": hvd.size(),
            "local_size": hvd.local_size(),
            "mpi": hvd.mpi_enabled(),
            "gloo": hvd.gloo_enabled(),
        }
        self.tell()
        self.facts["run"]["workers"] = self.gather({**about_this_worker(self.name), "wrong": self.wrong()})
        if hvd.size() > 1:
            self.facts["run"]["network"] = self.network()
        hvd.shutdown()

    def wrong(self) -> list[str]:
        """Return the integer allreduces whose result is not exact on this worker."""
        hvd = self._hvd
        operations: dict[str, tuple[Any, np.ufunc]] = {"Sum": (hvd.Sum, np.add), "Max": (hvd.Max, np.maximum)}
        found = []
        for bits in (32, 64):
            of_all = np.stack([integers(bits, rank) for rank in range(hvd.size())])
            own = of_all[hvd.rank()]
            for name, (operation, combine) in operations.items():
                result = self.allreduce(own, operation, f"{name}.int{bits}")
                expected = combine.reduce(of_all, axis=0, dtype=own.dtype)
                if result.dtype != own.dtype or not np.array_equal(result, expected):
                    found.append(f"int{bits} {name}")
        return found

    def network(self) -> dict[str, float]:
        """Measure float32 allreduces of two sizes.

        Return the seconds of a small one, and the bytes per second of a long one.
        """
        seconds = self.allreduce_seconds(1, 20)
        elements = SHORT
        while True:
            long = self.allreduce_seconds(elements, 3)
            if long > LONG_SECONDS or elements >= LONGEST:
                break
            elements *= 4
        workers = self._hvd.size()
        sent = 2 * (workers - 1) / workers * 4 * elements
        return {"small_seconds": seconds, "bytes_per_second": sent / max(long - seconds, 1e-9)}

    def allreduce_seconds(self, elements: int, times: int) -> float:
        """Return the seconds of the fastest allreduce, the same on all workers."""
        hvd, found = self._hvd, []
        tensor = self.tensor(np.ones(elements, np.float32))
        for _ in range(times + 1):
            begin = time.perf_counter()
            hvd.allreduce(tensor, op=hvd.Sum, name=f"horovod_quant.doctor.{elements}")
            found.append(time.perf_counter() - begin)
        fastest = np.array([min(found[1:])], np.float64)
        return float(self.allreduce(fastest, hvd.Max, f"{elements}.seconds")[0])

    def gather(self, about: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the facts of all workers, in rank order."""
        line = np.frombuffer(json.dumps(about).encode() + b"\n", np.uint8).copy()
        gathered = self._hvd.allgather(self.tensor(line), name="horovod_quant.doctor.workers").numpy()
        return [json.loads(line) for line in gathered.tobytes().splitlines()]

    def tensor(self, array: np.ndarray) -> Any:
        if self.name == "torch":
            return self._framework.from_numpy(array.copy())
        return self._framework.constant(array)

    def allreduce(self, array: np.ndarray, op: Any, name: str) -> np.ndarray:
        name = f"horovod_quant.doctor.{name}"
        return self._hvd.allreduce(self.tensor(array), op=op, name=name).numpy()


def integers(bits: int, rank: int) -> np.ndarray:
    """Return a worker's test values, so large that sums overflow."""
    dtype = np.dtype(f"int{bits}")
    limits = np.iinfo(dtype)
    values = np.random.default_rng([bits, rank]).integers(
        limits.min, limits.max, ELEMENTS, dtype, endpoint=True
    )
    values[:4] = [limits.max, limits.min, -1, rank]
    return values


def about_this_worker(framework: str) -> dict[str, Any]:
    """Return the properties that should be equal on all workers."""
    return {
        "host": socket.gethostname(),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "horovod-quant": horovod_quant.__version__,
        "Horovod": version_of("horovod"),
        FRAMEWORKS[framework]: sys.modules[framework].__version__,
        "kernels": kernel_name(),
    }


def kernel_name() -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "native" if kernels.get() is kernels.native else "numpy"
    except (ImportError, ValueError) as error:
        return f"none ({error})"


if __name__ == "__main__":
    Probe(sys.argv[1]).look("--run" in sys.argv[2:])
