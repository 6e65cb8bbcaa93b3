"""Which scenarios run in which launches, in each tier: see CONTRIBUTING.md, and the options in tests/conftest.py.

By default the launches are a covering array (covering.py). With ``--all`` they have `BREADTHS` as well, by which every
scenario runs with each controller and each number of workers, but not with each pair of them; with ``--thorough`` all
run with all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from covering import Launch, cover, each_feature_once
from helpers import has_keras_3
from scenario_table import ON_DEVICES, TABLES, TORCH_GPU_VARIANTS, names, split, without_keras_2

FEWEST = 2
"""Workers."""

COSTS = {Launch("gloo", 2): 1.0, Launch("mpi", 2): 1.0, Launch("mpi", 3): 1.6, Launch("gloo", 3): 8.0}
"""Of a scenario. Under Gloo three workers on two cores take many times as long as under Open MPI, which was told to
yield.
"""

DEFAULT = {
    "torch_scenarios": COSTS,
    "tf_scenarios": {Launch("gloo", 2): 1.0, Launch("mpi", 2): 1.0, Launch("mpi", 3): 2.5},
}
"""The launches of the default tier. Where three workers take turns under Gloo is no matter of the framework, and three
that trace a function each on two cores take long.
"""

BREADTHS = {
    "torch_scenarios": {
        Launch("gloo", 2): "full",
        Launch("gloo", 3): "core",
        Launch("mpi", 2): "core",
        Launch("mpi", 3): "extra",
    },
    "tf_scenarios": {
        Launch("gloo", 2): "full",
        Launch("gloo", 3): "core",
        Launch("mpi", 2): "core",
        Launch("mpi", 3): "quick",
    },
}


class Run(NamedTuple):
    """A launch of worker.py."""

    module: str
    controller: str
    workers: int
    label: str = ""
    options: Sequence[str] = ()
    """Further ones of horovodrun."""
    environment: Sequence[tuple[str, str]] = ()

    def __str__(self) -> str:
        return "-".join(
            filter(
                None, (self.module.replace("_scenarios", ""), self.controller, str(self.workers), self.label)
            )
        )


Plan = Mapping[Run, Sequence[str]]
"""The scenarios of each run."""


def parametrize(metafunc: Any, plan: Plan) -> None:
    """For a test with the arguments ``run`` and ``scenario``; conftest.py launches what it needs."""
    cases = [
        pytest.param(run, scenario, id=f"{run}-{scenario}")
        for run, names in plan.items()
        for scenario in names
    ]
    metafunc.parametrize(("run", "scenario"), cases)


def flat(tier: str) -> Plan:
    """What a script may do, with each framework."""
    if tier == "quick":
        first = "torch_scenarios"
        return {Run(first, "gloo", FEWEST): each_feature_once(names(first, "full"))}
    plan = {}
    for module, breadths in BREADTHS.items():
        every, table = names(module, "extra"), TABLES[module]
        few = [*table.slow, *table.in_pairs]
        coverings = [cover(every, DEFAULT[module], few, table.sampled, table.dear)]
        if tier != "default":
            coverings.append(cover(every, COSTS, table.slow))
        for launch, breadth in breadths.items():
            chosen = {name for covering in coverings for name in covering.get(launch, ())}
            if tier != "default":
                chosen.update(names(module, "extra" if tier == "thorough" else breadth))
            if found := [name for name in _that_can_run(module, every) if name in chosen]:
                plan[Run(module, *launch)] = found
    return plan


def among_four(tier: str) -> Plan:
    """Each method and variant once among four workers without nodes, with ``--all``."""
    module = "torch_scenarios"
    averages = [each for each in names(module, "extra") if split(each)[0] == "average"]
    return {Run(module, "mpi", 4): averages} if tier in ("all", "thorough") else {}


def with_keras_3(tier: str) -> Plan:
    """What a script may do with ``horovod_quant.keras``; by default each feature with a method or two."""
    module = "keras_scenarios"
    if not has_keras_3() or tier == "quick":
        return {}
    every, last = names(module, "full"), TABLES[module].sampled
    core = [name for name in names(module, "core") if split(name)[1] not in last]
    if tier == "default":
        every = [name for name in every if name in {*each_feature_once(every, last), *core}]
    return {
        Run(module, "gloo", 2): every,
        Run(module, "gloo", 3): each_feature_once(names(module, "full")[::-1], last),
        Run(module, "mpi", 3): core,
    }


def _nodes(
    module: str, controller: str, workers: int, by: str, hosts: str = "", dynamic: bool = False
) -> Run:
    """Hierarchical exchanges on nodes of ``by`` workers, or, if "True", on Horovod's hosts.

    Args:
        dynamic: process sets are added later, not in ``hvd.init``.
    """
    environment = [("HIERARCHICAL", by), *([("HOROVOD_DYNAMIC_PROCESS_SETS", "1")] if dynamic else [])]
    label = f"by-{by}{'-dynamic' if dynamic else ''}"
    return Run(module, controller, workers, label, ("-H", hosts) if hosts else (), tuple(environment))


TWO_HOSTS = "localhost:2,127.0.0.1:2"
TORCH_NODES = _nodes("torch_hierarchical_scenarios", "mpi", 4, "2", dynamic=True)
TF_NODES = _nodes("tf_hierarchical_scenarios", "mpi", 4, "2")
HIERARCHICAL = {
    _nodes("torch_hierarchical_scenarios", "gloo", 4, "True", TWO_HOSTS): "core",
    TORCH_NODES: "extra",
    _nodes("torch_hierarchical_scenarios", "gloo", 2, "True"): "full",
    _nodes("torch_hierarchical_scenarios", "gloo", 1, "True"): "core",
    _nodes("tf_hierarchical_scenarios", "mpi", 4, "2", dynamic=True): "core",
    TF_NODES: "once",
    _nodes("tf_hierarchical_scenarios", "gloo", 2, "True"): "core",
}


def hierarchical(tier: str) -> Plan:
    """Exchanges within nodes and between them."""
    return _by_breadths(HIERARCHICAL, tier, default=(TORCH_NODES, TF_NODES))


ALWAYS_CHECKED = ("hierarchical-binsgdm",)
"""With checked_streams.py: states are copied."""

NEVER_CHECKED = [f"ranks_with_other_kernels-{name}" for name in (*ON_DEVICES, *TORCH_GPU_VARIANTS)]
"""Native kernels know no streams."""


def on_a_gpu(tier: str, direct_workers: int, environment: Mapping[str, str]) -> Plan:
    """Once Horovod's collectives get the tensors, once they are staged through the host. Triton's interpreter does both
    with checked_streams.py, too.

    Args:
        direct_workers: 1 where there is one GPU, of which NCCL refuses to serve two; both are then in the default tier.
    """
    runs = [
        Run(
            "torch_gpu_scenarios", "gloo", workers, label, (),
            (*environment.items(), ("HOROVOD_QUANT_STAGING", staging)),
        )
        for label, workers, staging in (("direct", direct_workers, "0"), ("staged", 2, "1"))
    ]  # fmt: skip
    if direct_workers == 1:
        return _by_breadths(dict.fromkeys(runs, "full"), tier, default=runs)
    plan = dict(_by_breadths(dict(zip(runs, ("core", "full"))), tier, default=runs[1:]))
    if dict(environment).get("TRITON_INTERPRET"):
        checked = [
            run._replace(
                label=f"{run.label}-checked", environment=(*run.environment, ("CHECKED_STREAMS", "1"))
            )
            for run in runs
        ]
        found = _by_breadths(dict(zip(checked, ("full", "core"))), tier, default=checked)
        every = [name for name in names("torch_gpu_scenarios", "extra") if name not in NEVER_CHECKED]
        plan |= {
            run: [name for name in every if name in (*some, *ALWAYS_CHECKED)] for run, some in found.items()
        }
    return plan


SETTINGS = {
    "small": {"HOROVOD_CACHE_CAPACITY": "0", "HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "0.05"},
    "large": {"HOROVOD_FUSION_THRESHOLD": str(2**30), "HOROVOD_CYCLE_TIME": "30"},
    "autotune": {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1"},
}


def with_settings(tier: str) -> Plan:
    """Under settings of Horovod that few choose; by default one of them."""
    runs = [
        Run("torch_scenarios", "gloo", 2, label, (), tuple(own.items())) for label, own in SETTINGS.items()
    ]
    core = names("torch_scenarios", "core")
    if tier in ("all", "thorough"):
        return dict.fromkeys(runs, core)
    return {runs[0]: each_feature_once(core)}


def _by_breadths(breadths: Mapping[Run, str], tier: str, default: Sequence[Run]) -> Plan:
    """Each run in its breadth; by default each feature once, in a run or two."""
    if tier == "quick":
        return {}
    chosen = dict.fromkeys(default, "once") if tier == "default" else breadths
    return {
        run: _names(run.module, "extra" if tier == "thorough" else breadth) for run, breadth in chosen.items()
    }


def _names(module: str, breadth: str) -> Sequence[str]:
    if breadth != "once":
        return _that_can_run(module, names(module, breadth))
    return each_feature_once(_that_can_run(module, names(module, "full")), last=TABLES[module].sampled)


def _that_can_run(module: str, found: Sequence[str]) -> Sequence[str]:
    return without_keras_2(found) if module.startswith("tf_") and has_keras_3() else found
