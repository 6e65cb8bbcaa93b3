"""Statements of the papers that are not tested, and the reasons."""

from __future__ import annotations

from typing import NamedTuple

HARDWARE = "needs GPUs, or several machines"


class Untested(NamedTuple):
    """Statement without a verdict, its source, and the reason."""

    statement: str
    source: str
    reason: str


UNTESTED = (
    Untested(
        "ResNet-152 reaches full accuracy 1.8× faster on 16 GPUs",
        "QSGD, abstract",
        f"{HARDWARE}. `scripts/reproduce emulated` has the step times, not the accuracy",
    ),
    Untested(
        "image classification and speech recognition keep their accuracy",
        "QSGD, experiments",
        f"{HARDWARE}, and data sets that no Python package contains",
    ),
    Untested(
        "no scheme can use far fewer bits at the same variance",
        "QSGD, lower bound; NUQSGD, minimax optimality",
        "statements about all schemes: only a proof can decide them",
    ),
    Untested(
        "gradient descent with only the largest components",
        "QSGD, full version",
        "another scheme, which is not in this package",
    ),
    Untested(
        "QSGD converges on an asynchronous cluster",
        "QSGD, abstract",
        "delays are simulated, because Horovod workers are synchronous",
    ),
    Untested(
        "ResNets on CIFAR-10 and ImageNet reach the same accuracy as with QSGDinf and float32, in less time",
        "NUQSGD, experiments",
        f"{HARDWARE}. The variance is compared on gradients of a transformer, the loss on small models",
    ),
    Untested(
        "training is up to 3.51% faster than with other quantizers; the throughput with NVLink, PCIe and in a cloud",
        "Global-QSGD, both abstracts",
        f"{HARDWARE}. docs/model.md compares predictions with the authors' logs",
    ),
    Untested(
        "rates of convergence for the wider class of compressors",
        "Global-QSGD, theory",
        "proved; only the variance that they depend on is measured",
    ),
    Untested(
        "ResNet-50 trains 2.5× and BERT-Base 6.3× faster than with Adam, on 8 to 64 GPUs",
        "BinSGDM (Birder), abstract",
        f"{HARDWARE}. `scripts/reproduce emulated` has steps at the ratio of compute to transfer of the papers",
    ),
    Untested(
        "it converges at the rate of Adam",
        "BinSGDM (Birder), abstract",
        "proved for many steps and falling rates; 1,000 and 2,000 steps of 32 sequences cannot show it",
    ),
    Untested(
        "every method trains on a GPU",
        "this package",
        "`scripts/reproduce transformer-gpu` tests it on a machine with a GPU; it has no section until then",
    ),
)


def section() -> str:
    """Return the section of the summary."""
    rows = [f"| {each.statement} | {each.source} | {each.reason} |" for each in UNTESTED]
    header = ["| statement | source | why not |", "| --- | --- | --- |"]
    return "## What was not tested, and why\n\n" + "\n".join([*header, *rows])
