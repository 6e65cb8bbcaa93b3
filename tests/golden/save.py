r"""Writes what users keep, as this version of the package writes it: later ones must go on reading it.

    horovodrun -np 2 -H localhost:2 --gloo python tests/golden/save.py FOLDER
    horovodrun -np 2 -H localhost:2 --gloo horovod-quant bench --shapes 64x64 64 --methods none eden-3 \
        --json FOLDER/bench.json

The folder ``saved`` has what version 0.1.0 wrote before its schemes, names and layouts changed. It is not written
again: a change of what is saved adds another folder.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

import horovod_quant.torch as hvq

METHOD = "qsgd-4-bucket1024-allgather"
"""``qsgdinf-4`` in version 0.1.0, as the files say."""


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 30))


def train(compressor: hvq.Compressor, base: type[torch.optim.Optimizer], steps: int) -> torch.optim.Optimizer:
    trained = model()
    optimizer = hvd.DistributedOptimizer(
        base(trained.parameters(), lr=0.01), trained.named_parameters(), compression=compressor
    )
    for step in range(steps):
        optimizer.zero_grad()
        data = torch.randn(8, 40, generator=torch.Generator().manual_seed(2 * step + hvd.rank()))
        trained(data).pow(2).mean().backward()
        optimizer.step()
    return optimizer


def compressors() -> dict[str, hvq.Compressor]:
    """With every argument that a user can give, and with defaults."""
    common = {"min_elements": 100, "exclude": ["*.bias"], "seed": 7, "group_bytes": 2**20}
    return {
        "qsgd": hvq.QSGD(
            bits=5,
            norm="l2",
            bucket_size=512,
            coding="fixed",
            exchange="alltoall",
            rounding="correlated",
            **common,
        ),
        "nuqsgd": hvq.NUQSGD(bits=4, exchange="allgather"),
        "global-qsgd": hvq.GlobalQSGD(bits=8, overrides={"0.*": {"bits": 12}}),
        "eden": hvq.EDEN(bits=2, server_bits=4, exchange="alltoall", nmse=None, trellis=True),
        "eden-error": hvq.EDEN(nmse=0.1),
        "binsgdm": hvq.BinSGDM(server_bits=3),
        "auto": hvq.Auto(max_nmse=0.04, again_after=1000),
    }


def main() -> None:
    hvd.init()
    folder = Path(sys.argv[1])
    qsgd, binsgdm = hvq.QSGD(bits=4, seed=7), hvq.BinSGDM()
    train(qsgd, torch.optim.SGD, 3)
    optimizer = train(binsgdm, hvq.optim.BinSGDM, 3)
    auto = hvq.Auto(methods=[METHOD])
    # Which one is fastest is another question.
    auto.load_state_dict({"exchanges": {}, "choices": {"0.bias": {"method": METHOD, "workers": hvd.size()}}})
    train(auto, torch.optim.SGD, 3)
    if hvd.rank() == 0:
        (folder / "compressor.json").write_text(json.dumps(qsgd.state_dict()) + "\n")
        (folder / "auto.json").write_text(json.dumps(auto.state_dict()) + "\n")
        torch.save(optimizer.state_dict(), folder / "binsgdm.pt")
        for name, compressor in compressors().items():
            (folder / f"{name}.pickle").write_bytes(pickle.dumps(compressor, protocol=4))
    hvd.barrier()


if __name__ == "__main__":
    main()
