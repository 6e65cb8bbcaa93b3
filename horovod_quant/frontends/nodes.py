"""Nodes of workers, and the process sets of hierarchical reductions.

A node is a host, or a number of consecutive ranks chosen by the user. Each node is a process set (the group LOCAL), and
so are the workers with the same local rank (CROSS).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

from horovod_quant.frontends.arguments import hierarchy_of
from horovod_quant.schemes.base import ALL, CROSS, LOCAL, UNEVEN_HOSTS, Workers, nodes_of

_SIZES = {"HOROVOD_SIZE": "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE"}

_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


class Nodes(NamedTuple):
    """Workers of a reduction, and the process set of each group."""

    workers: Workers
    process_sets: Mapping[str, Any]


def flat(process_set: Any) -> Nodes:
    """Return the current workers of a process set, without a hierarchy."""
    return Nodes(Workers(process_set.rank(), process_set.size()), {ALL: process_set})


def groups(nodes: list[list[int]]) -> list[list[int]]:
    """Return the ranks of the nodes' process sets, in order of creation."""
    if len(nodes) == 1 or len(nodes[0]) == 1:
        return []
    return [*nodes, *(list(cross) for cross in zip(*nodes))]


def hierarchical_process_sets(ranks_per_node: bool | int | None = None) -> list[Any]:
    """Return the process sets for ``hvd.init(process_sets=...)`` with ``hierarchical=True``.

    They are unnecessary if Horovod may add process sets later: with ``hvd.init(process_sets="dynamic")``, or with
    ``HOROVOD_DYNAMIC_PROCESS_SETS=1`` in the environment.

    Args:
        ranks_per_node: the value of ``hierarchical=``; by default True, the ranks of each host, which must be
            consecutive, as horovodrun assigns them.

    Raises:
        RuntimeError: the environment does not have the number of workers.
        ValueError: the argument is something else, or the workers do not fill whole nodes.
    """
    from horovod.common.process_sets import ProcessSet

    by = hierarchy_of(True if ranks_per_node is None else ranks_per_node, name="ranks_per_node")
    if by is False:
        return []
    found = [(total, local) for total, local in _SIZES.items() if total in os.environ and local in os.environ]
    if not found:
        raise RuntimeError(
            "hierarchical_process_sets(): neither horovodrun nor mpirun has set the number of workers in the "
            'environment; use hvd.init(process_sets="dynamic") instead'
        )
    size, local_size = (int(os.environ[name]) for name in found[0])
    return [ProcessSet(ranks) for ranks in groups(nodes_of(range(size), local_size if by is True else by))]


def require_process_sets(basics: Any, hierarchical: bool | int) -> None:
    """Raise RuntimeError if this worker knows of missing process sets.

    Args:
        basics: ``mpi_ops._basics`` of Horovod, which has been initialized.
        hierarchical: True for hosts, or the number of consecutive ranks of a node.
    """
    size, by_host = basics.size(), hierarchical is True
    existing = list(map(tuple, _table(basics).values()))
    needed = groups(nodes_of(range(size), basics.local_size() if by_host else int(hierarchical)))
    if by_host:  # the hosts' ranks are not known here: only their number is checked
        missing = needed if len(existing) <= len(needed) else []
    else:
        missing = [ranks for ranks in needed if tuple(ranks) not in existing]
    if missing and os.environ.get(_DYNAMIC, "0") in ("", "0"):
        raise RuntimeError(_missing(missing[0], f"{_DYNAMIC} is not set", hierarchical))


def find(
    hvd: Any,
    basics: Any,
    hierarchical: bool | int,
    session: Any,
    gather: Callable[[list[int]], list[list[int]]],
) -> Nodes:
    """Return the nodes of Horovod's workers, and add missing process sets.

    All workers must call it.

    Args:
        hvd: ``horovod.torch`` or ``horovod.tensorflow``.
        basics: its ``mpi_ops._basics``.
        hierarchical: True for hosts, or the number of consecutive ranks of a node.
        session: an object that Horovod creates at each initialization; None where there is none.
        gather: function from integers of this worker to those of every worker.

    Raises:
        ValueError: the workers do not fill whole nodes.
        RuntimeError: process sets are missing and cannot be added.
    """
    key = _key(hvd, hierarchical)
    last = _found.get(key)
    # All workers must search again or none: the compared values are the same on all. Further process sets change
    # nothing: one worker alone may trace a function after they were added.
    if last is None or (_is_lost(last.table, basics) if session is None else last.session is not session):
        found = _find(hvd, basics, hierarchical, gather)
        last = _found[key] = _Found(session, _table(basics), found)
    return last.nodes


def are_known(hvd: Any, hierarchical: bool | int, session: Any) -> bool:
    """True if `find` returns this session's nodes without a search."""
    last = _found.get(_key(hvd, hierarchical))
    return last is not None and last.session is session


def _key(hvd: Any, hierarchical: bool | int) -> tuple:
    return hvd.__name__, hierarchical is True, int(hierarchical)


class _Found(NamedTuple):
    """Cached nodes; the reference to the session keeps its id unique."""

    session: Any
    table: dict[int, list[int]]
    nodes: Nodes


_found: dict[tuple, _Found] = {}


def _table(basics: Any) -> dict[int, list[int]]:
    """Return the ranks of the process sets by number, equal everywhere."""
    return basics._get_process_set_ids_and_ranks()


def _is_lost(table: dict[int, list[int]], basics: Any) -> bool:
    """True if a process set of ``table`` is gone or has changed."""
    present = _table(basics)
    return any(present.get(number) != ranks for number, ranks in table.items())


def _find(hvd: Any, basics: Any, hierarchical: bool | int, gather: Callable) -> Nodes:
    size = hvd.size()
    nodes = _hosts(basics, gather) if hierarchical is True else nodes_of(range(size), int(hierarchical))
    position = [*itertools.chain(*nodes)].index(hvd.rank())
    workers = Workers(position, size, local_size=len(nodes[0]))
    all_workers = hvd.global_process_set
    needed = groups(nodes)
    if not needed:  # one node, or nodes of one worker: there are no others
        return Nodes(workers, {ALL: all_workers, LOCAL: all_workers})
    process_sets = _process_sets(hvd, basics, needed, hierarchical)
    local, cross = process_sets[workers.node], process_sets[workers.nodes + workers.local_rank]
    return Nodes(workers, {ALL: all_workers, LOCAL: local, CROSS: cross})


def _hosts(basics: Any, gather: Callable[[list[int]], list[list[int]]]) -> list[list[int]]:
    """Return the ranks of each host, which need not be consecutive."""
    hosts, local_sizes = zip(*gather([basics.cross_rank(), basics.local_size()]))
    if len(set(local_sizes)) != 1:
        raise ValueError(UNEVEN_HOSTS)
    return nodes_of(sorted(range(len(hosts)), key=hosts.__getitem__), True, sorted(hosts))


def _process_sets(hvd: Any, basics: Any, needed: list[list[int]], hierarchical: bool | int) -> list[Any]:
    existing = {tuple(ranks): number for number, ranks in _table(basics).items()}
    process_sets = []
    for ranks in needed:
        if tuple(ranks) in existing:
            process_sets.append(hvd.ProcessSet(ranks))
            process_sets[-1].process_set_id = existing[tuple(ranks)]
            continue
        try:
            process_sets.append(hvd.add_process_set(ranks))
        except ValueError as error:
            raise RuntimeError(_missing(ranks, error, hierarchical)) from None
    return process_sets


def _missing(ranks: list[int], why: Any, hierarchical: bool | int) -> str:
    given = "" if hierarchical is True else hierarchical
    return (
        f"hierarchical: Horovod has no process set for ranks {ranks}, and cannot add one ({why}); start with "
        f'hvd.init(process_sets="dynamic"), or hvd.init(process_sets=hvq.hierarchical_process_sets({given})), or set '
        f"{_DYNAMIC}=1"
    )
