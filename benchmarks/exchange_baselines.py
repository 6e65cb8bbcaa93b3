"""DistributedDataParallel among Horovod's workers, a baseline of `exchange`."""

from __future__ import annotations

import os

import torch.distributed as dist

from horovod_quant.bench.network import address_of
from horovod_quant.bench.rounds import Bench


def connect(bench: Bench) -> None:
    """Make a process group of Horovod's workers, on Horovod's network interface."""
    if dist.is_initialized():
        return
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("HOROVOD_GLOO_IFACE")
    interface = interface or next(iter(bench.counter.names), None)
    own = None if interface is None else address_of(interface)
    if interface is None or own is None:
        raise SystemExit("the baselines cannot tell which network interface to use: set GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    store, port = None, 0
    if bench.rank == 0:
        store = dist.TCPStore(own, 0, bench.size, is_master=True, wait_for_workers=False)
        port = store.port
    address, port_text = bench.gather_texts(f"{own} {port}")[0].split()
    if store is None:
        store = dist.TCPStore(address, int(port_text), bench.size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=bench.rank, world_size=bench.size)
