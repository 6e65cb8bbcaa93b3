"""``horovod-quant bench`` with real workers; its times are nobody's business here."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "parallel"))

from helpers import extended  # noqa: E402
from launching import HOROVODRUN, environment, horovodrun  # noqa: E402

from horovod_quant.analysis.models import MODELS, elements  # noqa: E402
from horovod_quant.analysis.shapes import parse_shapes  # noqa: E402
from horovod_quant.bench import choosing, command, enough, memory, network, report  # noqa: E402
from horovod_quant.bench.gradients import ExactAverage, gradient  # noqa: E402
from horovod_quant.bench.network import Counter  # noqa: E402
from horovod_quant.bench.rounds import Found, Measurement, fewest_cores  # noqa: E402
from horovod_quant.bench.variants import Variant  # noqa: E402
from horovod_quant.cli import probe  # noqa: E402
from horovod_quant.cli.problem import Problem  # noqa: E402
from horovod_quant.frontends.arguments import GROUP_BYTES  # noqa: E402
from horovod_quant.frontends.methods import parse  # noqa: E402

COMMAND = Path(sys.executable).with_name("horovod-quant")
METHODS = ["global-qsgd-8", "global-qsgd-2", "qsgd-4", "binsgdm"]
TIMEOUT = 300

needs_horovod = pytest.mark.skipif(probe.horovod_folder() is None, reason="Horovod is not installed")


def alone(*options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMMAND), "bench", *map(str, options)],
        capture_output=True, text=True, timeout=TIMEOUT, env=environment(), stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_the_first_worker_warns_of_names_that_changed_their_meaning(
    rank: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_RANK", rank)
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    done = alone("--methods", "qsgd-4", "nuqsgd-4", "eden-3", "global-qsgd-8", "--rounds", 0)
    for name, meant in (
        ("qsgd-4", "qsgd-4-l2-bucket1024-allgather"),
        ("nuqsgd-4", "nuqsgd-4-allgather"),
        ("eden-3", "eden-3-server3"),
    ):
        assert done.stderr.count(f"the method {name!r} now has its class's default arguments") == times
        assert done.stderr.count(f"in version 0.1 is called {meant!r}") == times, done.stderr
    assert "'global-qsgd-8'" not in done.stderr


# ---- what it finds --------------------------------------------------------------------------------------------------


@pytest.mark.parallel
@needs_horovod
@pytest.mark.parametrize(
    ("framework", "controller"), [("torch", "gloo"), extended("torch", "mpi"), extended("tensorflow", "gloo")]
)
def test_measures_every_method(framework: str, controller: str, tmp_path: Path) -> None:
    chosen = [] if framework == "torch" else ["--framework", framework]
    done = horovodrun(
        controller, 2,
        [COMMAND, "bench", "--model", "tiny", "--rounds", 3, "--methods", *METHODS, *chosen,
         "--json", tmp_path / "bench.json", "--plot", tmp_path / "bench.png"],
        own_network=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"round 3 of 3: none .* m?s, fp16 .* m?s, global-qsgd-8 .* m?s, ", done.stdout), (
        done.stdout
    )
    assert "\r" not in done.stdout
    found = json.loads((tmp_path / "bench.json").read_text())
    expected = {
        "version": 2, "framework": framework, "model": "tiny", "workers": 2, "hosts": 1, "workers_per_host": 2,
        "controller": controller, "elements": elements(MODELS["tiny"]), "group_bytes": GROUP_BYTES, "rounds": 3,
        "interrupted": False, "shapes": {name: list(shape) for name, shape in MODELS["tiny"].items()},
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["cores"] >= 1
    assert all(isinstance(found[name], str) and found[name] for name in ("kernels", "processor"))
    results = {result["method"]: result for result in found["results"]}
    assert list(results) == ["none", "fp16", "global-qsgd-8", "qsgd-4", "binsgdm"]
    assert "global-qsgd-2 is left out: bits=2" in done.stdout
    for result in results.values():
        for name in ("wall_seconds", "cpu_seconds"):
            assert len(result[name]) == 3
            assert all(0 < seconds < 100 for seconds in result[name])
        assert result["speed_up"] > 0
    sent = {method: result["bytes_sent"] for method, result in results.items()}
    assert sent["none"] == 4 * elements(MODELS["tiny"]) == 2 * sent["fp16"]
    assert sent["binsgdm"] < sent["qsgd-4"] < sent["global-qsgd-8"] < sent["fp16"]
    if controller == "gloo":  # MPI shares memory
        assert results["none"]["interface_bytes_sent"] > 0.99 * 2 * sent["none"]
    assert all("relative_error" not in result for result in results.values())
    nmses = {method: result["nmse"] for method, result in results.items()}
    assert nmses["none"] < 1e-12 < nmses["fp16"] < 1e-6 < nmses["global-qsgd-8"] < nmses["qsgd-4"] < 0.09
    assert nmses["qsgd-4"] > 0.14**2 / 2, "a square, not a root"
    assert nmses["binsgdm"] is None
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.count("| qsgd-4 ") == 1
    assert found["recommended"] in ("none", "fp16", "global-qsgd-8", "qsgd-4")
    line, reason = (each for each in done.stdout.splitlines() if "In the script" in each or "Why: " in each)
    assert line.endswith(f"compression={found['code']}")
    assert "Why: " in reason
    assert "\x1b" not in done.stdout


@pytest.mark.parallel
@pytest.mark.extended
@needs_horovod
def test_shapes_of_ones_own_and_the_same_gradients_again(tmp_path: Path) -> None:
    def run(name: str, *shapes: Any) -> dict[str, Any]:
        done = horovodrun(
            "gloo", 2,
            [COMMAND, "bench", "--shapes", *shapes, "--rounds", 1, "--methods", "nuqsgd-4", "--seed", 7,
             "--group-bytes", 5000, "--json", tmp_path / name],
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:]
        return json.loads((tmp_path / name).read_text())

    first = run("first.json", "30x50", "7", "3x3x8x16")
    assert (first["model"], first["elements"], first["group_bytes"]) == (None, 2659, 5000)
    again = run("again.json", tmp_path / "first.json")
    assert again["shapes"] == first["shapes"]
    for one, other in zip(first["results"], again["results"]):
        assert one["nmse"] == other["nmse"]


def test_results_are_of_the_slowest_worker_and_ratios_within_a_round() -> None:
    """Two methods, three rounds, two workers."""
    wall = np.array([[[1, 2], [1, 1]], [[9, 3], [3, 2]], [[4, 4], [1, 8]]], float)
    rounds = np.zeros((3, 2, 2, len(Measurement._fields)))
    rounds[..., Measurement._fields.index("wall")] = wall
    rounds[..., Measurement._fields.index("cpu")] = wall
    rounds[..., 1, Measurement._fields.index("interface")] = np.nan  # not its host's first worker
    rounds[..., 0, Measurement._fields.index("interface")] = [[10, 20], [11, 20], [15, 20]]
    none, other = report.results(["none", "qsgd-4"], Found(list(rounds), [8.0, 4.0], [0.0, 0.5]))
    assert (none["wall_seconds"], other["wall_seconds"]) == ([2, 9, 4], [1, 3, 8])
    assert (none["cpu_seconds"], other["cpu_seconds"]) == ([1.5, 6, 4], [1, 2.5, 4.5])
    assert (none["speed_up"], other["speed_up"]) == (1, 2)  # 2, 3 and 1/2
    assert (none["interface_bytes_sent"], other["interface_bytes_sent"]) == (11, 20)
    assert (other["bytes_sent"], other["nmse"]) == (4, 0.5)
    rounds[..., Measurement._fields.index("interface")] = np.nan
    unread = report.results(["none", "qsgd-4"], Found(list(rounds), [8.0, 4.0], [0.0, None]))[1]
    assert unread["interface_bytes_sent"] is None
    assert unread["nmse"] is None


def test_auto_measures_until_ratios_are_known() -> None:
    """True ratio 2, with noise of 1% or 30%; the same machine state for both in a round."""
    state, noise = np.random.default_rng(1).standard_normal((2, 400, 2))
    state = 1 + abs(state[:, :1])
    for spread, fewest, most in ((0.01, enough.FEWEST, 12), (0.3, 40, enough.MOST)):
        wall = state * [2e-3, 1e-3] * (1 + spread * np.clip(noise, -2, 2))
        rounds = next(count for count in range(1, 401) if enough.is_enough(wall[:count], 0))
        assert fewest <= rounds <= most
    assert enough.is_enough(np.full((enough.FEWEST, 2), enough.LONGEST), 0)
    assert not enough.is_enough(np.ones((enough.FEWEST - 1, 2)), 0)


def test_the_interval_has_the_true_median_as_often_as_it_says() -> None:
    """1,000 samples each, of 95% in truth: fewer than 92% are 4 standard errors away."""
    for count in (enough.FEWEST, 7, 20, 51):
        samples = np.random.default_rng(count).exponential(size=(count, 1000))
        lowest, median, highest = enough.interval(samples)
        assert ((lowest <= median) & (median <= highest)).all()
        assert np.mean((lowest <= np.log(2)) & (np.log(2) <= highest)) > 0.92


def test_bars_tell_their_values() -> None:
    setting = {
        "framework": "torch", "controller": "gloo", "model": "tiny", "workers": 2, "hosts": 1,
    }  # fmt: skip
    found = [
        {"method": "none", "wall_seconds": [1.2, 1.3], "bytes_sent": 8e6},
        {"method": "eden-3", "wall_seconds": [0.05, 0.07], "bytes_sent": 0.75e6},
    ]
    time, size = report.bars(setting, found).axes
    assert [text.get_text() for text in time.texts] == ["1,250", "60"]
    assert [text.get_text() for text in size.texts] == ["8", "0.75"]
    assert time.get_xlim()[1] > 1300


def result_of(name: str, milliseconds: float, nmse: float | None) -> tuple[Variant, dict[str, Any]]:
    measured = {
        "wall_seconds": [1e-3 * milliseconds],
        "speed_up": 100 / milliseconds,
        "nmse": nmse,
    }
    return Variant(name, parse(name), GROUP_BYTES), measured


@pytest.mark.parametrize(
    ("measured", "method", "said"),
    [
        (
            [("qsgd-4", 40, 0.02), ("nuqsgd-4", 39.5, 0.058)],
            "qsgd-4",
            "2.50x faster, and the average's nmse",
        ),
        ([("qsgd-4", 40, 0.02), ("qsgd-2", 20, 0.2)], "qsgd-4", "takes 40 ms instead of 100 ms"),
        (
            [("qsgd-4", 97, 0.02), ("fp16", 120, 1e-8)],
            "none",
            "no method is meaningfully faster: with an nmse up to 0.09 none is 5% faster",
        ),
        (
            [("eden-3", 50, 0.04), ("binsgdm", 20, None)],
            "eden-3",
            "binsgdm takes 20 ms, but it is another optimizer",
        ),
    ],
)
def test_the_report_ends_with_what_to_take(measured: list[tuple], method: str, said: str) -> None:
    variants, results = zip(*(result_of(*each) for each in [("none", 100, 1e-8), *measured]))
    chosen = choosing.choose(variants, results)
    assert chosen is not None
    assert chosen.method == method
    line, reason = choosing.lines(chosen, "torch")
    assert line.endswith(f"compression={parse(method).code()}")
    assert said in reason
    hvd = pytest.importorskip("horovod.torch")
    import horovod_quant.torch as hvq

    assert eval(chosen.code, {"hvq": hvq, "hvd": hvd}) is not None


def test_without_none_there_is_nothing_to_recommend() -> None:
    variants, results = zip(result_of("qsgd-4", 40, 0.02))
    assert choosing.choose(variants, results) is None
    assert choosing.choose([Variant("no exchange", None, 1)], [results[0]]) is None


def test_groups_of_ones_own_are_in_the_line() -> None:
    variants, results = zip(result_of("none", 100, 1e-8), result_of("qsgd-4", 40, 0.02))
    chosen = choosing.choose([variants[0], variants[1]._replace(group_bytes=2**20)], results)
    assert chosen is not None
    assert chosen.code.endswith("group_bytes=1048576)")


def test_gradients_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [Variant(name, parse(name), GROUP_BYTES) for name in ("none", "qsgd-4", "binsgdm")]
    shapes = {"only": (1000, 1000)}
    # Twice float32, momentum and scale, and half of the average in float64.
    needed = 10**6 * (2 * 4 + 2 * 4 + 8 // 2)
    assert memory.memory_problem(shapes, variants, 2, 1, needed) == ""
    assert memory.memory_problem(shapes, variants, 2, 1, needed - 1) != ""
    assert memory.memory_problem(shapes, variants, 2, 1, None) == ""
    found = memory.memory_problem({"only": (10**6, 10**4)}, variants, 2, 2, 64 * 10**9)
    assert found.startswith(
        "--model, --shapes: 10,000,000,000 elements need 400.0 GB of memory on a host with 2 of "
    )
    assert "and 64.0 GB are free; use fewer elements, or fewer workers on each host" in found

    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "LIMIT", tmp_path / "limit")
    assert memory.free_bytes() is None
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    (tmp_path / "limit").write_text("max\n")
    assert memory.free_bytes() == 50 * 1024
    (tmp_path / "limit").write_text("1000\n")
    assert memory.free_bytes() == 1000


def test_error_is_against_the_float64_average() -> None:
    shapes = {"a": (10, 3), "b": (), "c": (7,)}
    averages = [
        np.mean([gradient(shape, 5, rank, index).astype(float) for rank in range(3)], axis=0)
        for index, shape in enumerate(shapes.values())
    ]
    off = [average * 1.25 for average in averages]
    exact = np.array([ExactAverage(shapes, 5, rank, 3).squares(averages) for rank in range(3)])
    assert (exact[:, 0] == 0).all()
    error, size = np.array([ExactAverage(shapes, 5, rank, 3).squares(off) for rank in range(3)]).sum(axis=0)
    assert math.sqrt(error / size) == pytest.approx(0.25)


def test_counter_reads_loopback_on_one_host_and_the_way_to_the_others_between_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Counter([]).bytes_sent() is not None
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    monkeypatch.setattr(network, "COUNTERS", tmp_path / "dev")
    assert (Counter([]).names, Counter([]).bytes_sent()) == ([], None), "unreadable"
    network.COUNTERS.write_text(
        "Inter-|   Receive  |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes\n"
        "    lo: 5 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0\n  eth1:7 0 0 0 0 0 0 0 300 0 0 0 0 0 0 0\n"
    )
    assert Counter([]).bytes_sent() == 1
    assert Counter(["127.0.0.1"]).names == ["lo"]
    for interface, names, sent in (("eth1", ["eth1"], 300), ("eth7", [], None)):
        monkeypatch.setenv("HOROVOD_GLOO_IFACE", interface)
        counter = Counter(["host2"])
        assert (counter.names, counter.bytes_sent()) == (names, sent)


def test_cores_are_those_of_all_workers_of_a_host() -> None:
    bound = [("a", "01"), ("a", "23"), ("b", "01"), ("b", "234")]
    assert fewest_cores(bound) == 4
    assert fewest_cores([("a", "0123"), ("a", "0123")]) == 4


@pytest.mark.parallel
@pytest.mark.extended
@needs_horovod
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_cores_that_a_launcher_binds_its_workers_to_are_added(tmp_path: Path) -> None:
    script, path = tmp_path / "worker.sh", tmp_path / "bench.json"
    one, other = sorted(os.sched_getaffinity(0))[:2]
    script.write_text(
        f"case $HOROVOD_RANK in 0) core={one};; *) core={other};; esac\n"
        f"exec taskset -c $core '{COMMAND}' bench --model tiny --methods qsgd-4 --rounds 1 --json '{path}'\n"
    )
    done = horovodrun("gloo", 2, ["sh", script], timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-3000:]
    assert json.loads(path.read_text())["cores"] == 2


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------


class Endless:
    """A benchmark that would run for ever.

    Attributes:
        launcher: the process of horovodrun.
        workers: process ids, by rank.
    """

    def __init__(self, controller: str, folder: Path) -> None:
        script, self.json = folder / "worker.sh", folder / "bench.json"
        rank = "$HOROVOD_RANK" if controller == "gloo" else "$OMPI_COMM_WORLD_RANK"
        script.write_text(
            f"echo $$ > '{folder}'/pid.{rank}\n"
            f"exec '{COMMAND}' bench --model tiny --methods qsgd-4 --rounds 1000000 --json '{self.json}'\n"
        )
        env = environment()
        self.output = folder / "output"
        with open(self.output, "w") as output:
            self.launcher = subprocess.Popen(
                [*HOROVODRUN, f"--{controller}", "-np", "2", "sh", str(script)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip
        self._wait(self.json.exists)  # a round is done
        self.workers = [int((folder / f"pid.{rank}").read_text()) for rank in range(2)]

    def _wait(self, condition: Any) -> None:
        limit = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < limit, self.output.read_text()[-3000:]
            time.sleep(0.1)

    def finish(self) -> tuple[int, str, dict[str, Any]]:
        """Exit status, output and results, once all its processes have ended."""
        status = self.launcher.wait(timeout=TIMEOUT)
        self._wait(lambda: not any(Path(f"/proc/{worker}").exists() for worker in self.workers))
        return status, self.output.read_text(), json.loads(self.json.read_text())

    def kill(self) -> None:
        for worker in getattr(self, "workers", []):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.launcher.pid, signal.SIGKILL)


@contextmanager
def endless(controller: str, folder: Path) -> Iterator[Endless]:
    run = Endless(controller, folder)
    try:
        yield run
    finally:
        run.kill()


def assert_rounds_are_kept(output: str, found: dict[str, Any]) -> None:
    assert found["interrupted"] is True
    assert [result["method"] for result in found["results"]] == ["none", "fp16", "qsgd-4"]
    assert all(len(result["wall_seconds"]) == found["rounds"] >= 1 for result in found["results"])
    assert f"round {found['rounds']} of 1000000: none " in output
    # A launcher whose workers end may end with a traceback of its own.
    of_launcher = "\n".join(line for line in output.splitlines() if not line.startswith("["))
    assert output.count("Traceback") == of_launcher.count("Traceback")
    assert "KeyboardInterrupt" not in output


@pytest.mark.parallel
@needs_horovod
@pytest.mark.parametrize("controller", ["gloo", extended("mpi")])
def test_ctrl_c_ends_all_and_leaves_the_rounds(controller: str, tmp_path: Path) -> None:
    """As a terminal does: all processes of its foreground group get the signal, which workers are not in."""
    with endless(controller, tmp_path) as run:
        os.killpg(run.launcher.pid, signal.SIGINT)
        _, output, found = run.finish()
    assert_rounds_are_kept(output, found)


@pytest.mark.parallel
@pytest.mark.extended
@needs_horovod
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGINT, 0), (signal.SIGINT, 1), (signal.SIGKILL, 1)])
def test_a_worker_that_ends_ends_all(number: int, rank: int, tmp_path: Path) -> None:
    with endless("gloo", tmp_path) as run:
        os.kill(run.workers[rank], number)
        status, output, found = run.finish()
    assert status != 0
    assert_rounds_are_kept(output, found)


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "qsgd-4", "nonsense"], "--methods: there is no method 'nonsense'; use none, fp16"),
        (["--methods", "qsgd"], "--methods: 'qsgd' lacks the number of bits"),
        (["--methods", "qsgd-99"], "--methods: 'qsgd-99': bits=99: use an integer from 2 to 16"),
        (["--rounds", "0"], "--rounds=0: use an integer from 1"),
        (["--group-bytes", "0"], "--group-bytes=0"),
        (["--seed", "-1"], "--seed=-1"),
        (["--model", "nonsense"], "argument --model: invalid choice: 'nonsense'"),
        (["--model", "tiny", "--shapes", "3"], "not allowed with argument"),
        (["--framework", "jax"], "argument --framework: invalid choice"),
        (["--rounds", "many"], "argument --rounds: 'many': use a number, or auto"),
        (["--framework", "torch", "--shapes", "3x", "4"], "--shapes: '3x' is not a shape"),
        (["--framework", "torch", "--shapes", "/nowhere/a.json"], "--shapes: [Errno 2] No such file"),
        (["--framework", "torch", "--json", "/nowhere/a.json"], "--json: [Errno 2] No such file"),
        (["--framework", "torch", "--json", ""], "--json: '' is no name of a file"),
        (["--framework", "torch", "--json", "/"], "--json: / is not a file"),
        (["--framework", "torch", "--json", "/dev/full"], "--json: /dev/full is not a file"),
        (["--framework", "torch", "--plot", "/tmp/bench.xyz"], "must end in one of"),
        (
            ["--framework", "torch", "--shapes", "1000000x1000000x1000000"],
            "use 8,589,934,592 elements or fewer",
        ),
        (["--framework", "torch", "--shapes", 20 * "9"], "use sizes that are integers"),
    ],
)
def test_mistakes_are_explained_before_a_framework_is_imported(options: list[str], message: str) -> None:
    done = alone(*options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_compression_that_is_switched_off_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_QUANT_DISABLE", "1")
    done = alone("--framework", "torch")
    assert done.returncode == 2
    assert "HOROVOD_QUANT_DISABLE=1: every method would be measured as none; unset it" in done.stderr


def test_a_problem_of_another_worker_alone_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The launcher ends the others at the exit status; before that, rank 0 could print the same problem."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("HOROVOD_SIZE", "4")

    def plan() -> Any:
        raise Problem("no such package")

    for rank, said, waits in (("0", "no such package", 0), ("3", "worker 3: no such package", 1)):
        monkeypatch.setenv("HOROVOD_RANK", rank)
        assert command.run_plan(plan) == 2
        assert capsys.readouterr().err == f"horovod-quant bench: error: {said}\n"
        assert len(waited) == waits


@needs_horovod
def test_one_worker_is_told_to_start_more() -> None:
    done = alone("--model", "tiny")
    assert done.returncode == 2
    assert "one worker sends nothing; start several: horovodrun -np 2 horovod-quant bench" in done.stderr


@pytest.mark.parallel
@needs_horovod
@pytest.mark.parametrize(
    ("controller", "options", "message"),
    [
        extended("gloo", ["--methods", "nonsense"], "--methods: there is no method 'nonsense'"),
        extended("mpi", ["--methods", "nonsense"], "--methods: there is no method 'nonsense'"),
        ("gloo", ["--json", "/nowhere/bench.json"], "--json: [Errno 2] No such file or directory"),
        extended("mpi", ["--json", "/"], "--json: / is not a file"),
        extended("gloo", ["--plot", "{folder}/bench.xyz"], "must end in one of"),
        extended("gloo", ["--shapes", "3x", "4"], "--shapes: '3x' is not a shape"),
        extended(
            "mpi", ["--shapes", "{folder}/missing.json"], "--shapes: [Errno 2] No such file or directory"
        ),
    ],
)
def test_mistakes_end_all_workers(
    controller: str, options: Sequence[str], message: str, tmp_path: Path
) -> None:
    options = [option.format(folder=tmp_path) for option in options]
    done = horovodrun(controller, 2, [COMMAND, "bench", *options], timeout=TIMEOUT)
    assert done.returncode not in (0, -9), done.stdout[-3000:]
    assert done.stdout.count(message) == 1, done.stdout[-3000:]
    assert "horovod_quant/" not in done.stdout  # no traceback of ours; horovodrun itself prints one
    assert "warming up" not in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "shapes"),
    [
        (["1000x10", "64"], {"gradient0": (1000, 10), "gradient1": (64,)}),
        (['{"fc.weight": [10, 64], "scale": []}'], {"fc.weight": (10, 64), "scale": ()}),
        (['{"version": 1, "shapes": {"a": [1]}}'], {"a": (1,)}),
    ],
)
def test_shapes(given: list[str], shapes: dict[str, Any], tmp_path: Path) -> None:
    assert parse_shapes(written(given, tmp_path)) == shapes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["3", "4xx4"], "'4xx4' is not a shape"),
        (["3", "-4"], "'-4' is not a shape"),
        (["0x3"], "1 or more"),
        (["{"], "is not a JSON file"),
        (["{}"], "write an object of lists of sizes"),
        (["[[1]]"] , "write an object of lists of sizes"),
        (['{"a": [1.5]}'], "a: use sizes that are integers"),
        (['{"a": 3}'], "a: use sizes that are integers"),
        (['{"a": [1' + 40 * ", 1" + "]}"], "a: use 32 sizes or fewer, not 41"),
        ([100_000 * "["], "is not a JSON file: its lists or objects are nested too deeply"),
        (['{"a": [1000000, 1000000]}'], "use 8,589,934,592 elements or fewer, not 1,000,000,000,000"),
    ],
)  # fmt: skip
def test_bad_shapes(given: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shape|sizes|JSON|elements") as caught:
        parse_shapes(written(given, tmp_path))
    assert message in str(caught.value)


def written(given: list[str], folder: Path) -> list[str]:
    """JSON texts as the name of a file that holds them."""
    if given[0][0] not in "[{":
        return given
    path = folder / "shapes.json"
    path.write_text(given[0])
    return [str(path)]


@pytest.mark.parallel
@needs_horovod
def test_a_lost_output_costs_no_measurement(tmp_path: Path) -> None:
    script, path = tmp_path / "worker.sh", tmp_path / "bench.json"
    script.write_text(
        f"exec '{COMMAND}' bench --model tiny --methods qsgd-4 --rounds 1 --json '{path}' > /dev/full\n"
    )
    done = horovodrun("gloo", 2, ["sh", script], timeout=TIMEOUT)
    assert done.returncode != 0
    assert done.stdout.count("horovod-quant bench: standard output: No space left on device") == 1
    assert "horovod_quant/" not in done.stdout
    assert json.loads(path.read_text())["interrupted"] is False


def test_packages_that_are_missing_are_named() -> None:
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "from horovod_quant.bench import command\n"
        "try: command.check_output(None, None)\n"
        "except command.Problem as problem: print(problem)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.stdout == "rich is not installed: pip install rich\n", done.stderr
