"""What of the papers is not tested, and why."""

from __future__ import annotations

from typing import NamedTuple

HARDWARE = "needs GPUs, or more machines than one"


class Untested(NamedTuple):
    """A statement, where it stands, and why there is no verdict on it."""

    statement: str
    source: str
    reason: str


UNTESTED = (
    Untested(
        "ResNet-152 is trained to full accuracy 1.8 times as fast on 16 GPUs",
        "QSGD, abstract",
        f"{HARDWARE}. Steps between hosts with slow links are in the section on the transformer",
    ),
    Untested(
        "image classification and speech recognition keep their accuracy",
        "QSGD, experiments",
        f"{HARDWARE}, and data sets that no Python package brings",
    ),
    Untested(
        "no scheme can have much fewer bits at the same variance",
        "QSGD, lower bound; NUQSGD, minimax optimality",
        "statements about all schemes: a proof decides them, no measurement",
    ),
    Untested(
        "gradient descent with the largest components alone",
        "QSGD, full version",
        "another scheme, which is not in this package",
    ),
    Untested(
        "QSGD converges on a cluster that is asynchronous",
        "QSGD, abstract",
        "delays are simulated: Horovod's workers are synchronous",
    ),
    Untested(
        "ResNets on CIFAR-10 and ImageNet learn as with QSGDinf and float32, in less time",
        "NUQSGD, experiments",
        f"{HARDWARE}. The variance is compared on gradients of a transformer, the loss on small models",
    ),
    Untested(
        "trainings are up to 3.51% faster than with other quantizers; the throughput with NVLink, PCIe and in a cloud",
        "Global-QSGD, both abstracts",
        f"{HARDWARE}. docs/advise.md has predictions beside the authors' logs",
    ),
    Untested(
        "rates of convergence for the wider class of compressors",
        "Global-QSGD, theory",
        "proved; only the variance that goes into them is measured",
    ),
    Untested(
        "the advantage over QSGD in time grows with n",
        "Global-QSGD, the compression ratio of its abstract, in time",
        "bytes are counted with up to 1,024 simulated workers, steps are timed with 4 hosts only",
    ),
    Untested(
        "ResNet-50 is trained 2.5 times and BERT-Base 6.3 times as fast as with Adam, on 8 to 64 GPUs",
        "BinSGDM (Birder), abstract",
        f"{HARDWARE}. Verdicts on speed say only whether a step is shorter at all, with the links named",
    ),
    Untested(
        "it converges at the rate of Adam",
        "BinSGDM (Birder), abstract",
        "proved for many steps and falling rates; 1,000 and 2,000 steps of 32 sequences cannot show it",
    ),
    Untested(
        "every method trains on a GPU",
        "this package",
        "`scripts/reproduce transformer-gpu` does it where there is a GPU, and has no section until one has run it",
    ),
)


def section() -> str:
    """Of the page."""
    rows = [f"| {each.statement} | {each.source} | {each.reason} |" for each in UNTESTED]
    header = ["| statement | where it stands | why not |", "| --- | --- | --- |"]
    return "## What was not tested, and why\n\n" + "\n".join([*header, *rows])
