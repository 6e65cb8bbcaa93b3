# %% [markdown]
# # Quantization in ten minutes
#
# For readers who want to see why few bits are enough. Each cell draws a picture into the folder `explained`. Run it as
# a script, or open it as a notebook (jupytext, VS Code).

# %%
from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from horovod_quant import simulator
from horovod_quant.schemes import EDEN, QSGD

FOLDER = Path("explained")
FOLDER.mkdir(parents=True, exist_ok=True)
random = np.random.default_rng(0)


def nmse(scheme: QSGD | EDEN, gradients: np.ndarray, steps: int = 10) -> float:
    """Return the nmse of the workers' average, a mean over steps.

    The nmse is the squared error divided by the square of the exact average.
    """
    exact = gradients.mean(axis=0, dtype=np.float64)
    results = [simulator.run(scheme, list(gradients), step=step).decoded[0][0] for step in range(steps)]
    return float(np.mean([np.square(result - exact).sum() for result in results]) / np.square(exact).sum())


# %% [markdown]
# ## 1. Levels: round to few values, up or down at random
#
# QSGD divides a bucket of elements by its norm and rounds each element to one of a few levels. A value between two
# levels becomes the upper one with a probability such that the expectation is the value itself. So a single rounding is
# coarse, and the average of many roundings is exact: the noise averages out over workers and steps.

# %%
gradient = np.sort(random.standard_normal(256)).astype(np.float32)
scheme = QSGD(bits=3, bucket_size=256)
once = simulator.run(scheme, [gradient]).decoded[0][0]
often = np.mean([simulator.run(scheme, [gradient], step=step).decoded[0][0] for step in range(200)], axis=0)

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
axes.plot(gradient, once, ".", markersize=3, label="rounded once, 3 bits")
axes.plot(gradient, often, "-", linewidth=1, label="mean of 200 roundings")
axes.set(xlabel="element", ylabel="decoded", title="Stochastic rounding is unbiased")
axes.legend()
figure.savefig(FOLDER / "levels.png", dpi=100)

# %% [markdown]
# ## 2. Correlated rounding: workers make opposite errors
#
# A training uses the average over workers. If workers draw their random numbers such that one rounds up where
# another rounds down, each of them is as unbiased as before, and the errors cancel in the average. Where workers have
# similar gradients, the average has a much smaller error for the same bytes.

# %%
WORKERS = (1, 2, 4, 8, 16)
shared = random.standard_normal(4096)
alike = np.stack([shared + 0.01 * random.standard_normal(4096) for _ in range(max(WORKERS))]).astype(
    np.float32
)

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for rounding, label in (("independent", "independent rounding"), ("correlated", "correlated rounding")):
    errors = [nmse(QSGD(bits=4, rounding=rounding), alike[:size]) for size in WORKERS]
    axes.loglog(WORKERS, errors, "o-", base=2, label=label)
axes.set(xlabel="workers", ylabel="nmse of the average", title="Similar gradients, QSGD with 4 bits")
axes.legend()
figure.savefig(FOLDER / "correlated.png", dpi=100)

# %% [markdown]
# ## 3. Rotation: every bucket looks like Gaussian noise
#
# One large element takes all levels of its bucket, and nothing is left for the others. EDEN first multiplies a bucket
# by random signs and a Hadamard matrix, a rotation that spreads every element over all coordinates. Whatever the bucket
# was, its coordinates are then nearly Gaussian, and one set of levels, made for Gaussian values, fits all. The receiver
# rotates back.


# %%
def rotated(bucket: np.ndarray) -> np.ndarray:
    """Return a bucket after random signs and a Hadamard transform.

    Its length must be a power of two.
    """
    values = bucket * random.choice([-1.0, 1.0], len(bucket))
    width = 1
    while width < len(values):
        pairs = values.reshape(-1, 2, width)
        values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        width *= 2
    return values / np.sqrt(len(values))


spiky = random.laplace(size=1024) ** 3
figure, panels = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
for axes, values, title in zip(
    panels, (spiky, rotated(spiky)), ("a bucket with few large elements", "rotated")
):
    axes.hist(values, bins=60)
    axes.set(title=title, yscale="log")
figure.savefig(FOLDER / "rotation.png", dpi=100)

# %% [markdown]
# ## 4. So the error depends on the bits alone
#
# QSGD's error depends on the gradient. EDEN's is the same for every gradient.

# %%
GRADIENTS = {
    "Gaussian": random.standard_normal((4, 8192)),
    "Laplace": random.laplace(size=(4, 8192)),
    "spiky": random.laplace(size=(4, 8192)) ** 3,
}
BITS = (2, 3, 4)
figure, panels = plt.subplots(1, 2, figsize=(8, 3.5), sharey=True, layout="constrained")
for axes, kind, name in zip(panels, (QSGD, EDEN), ("QSGD", "EDEN")):
    for title, gradients in GRADIENTS.items():
        axes.semilogy(
            BITS, [nmse(kind(bits=bits), gradients.astype(np.float32)) for bits in BITS], "o-", label=title
        )
    axes.set(title=name, xlabel="bits per element", xticks=BITS)
panels[0].set_ylabel("nmse of the average")
panels[1].legend()
figure.savefig(FOLDER / "bits.png", dpi=100)
print(f"explained: pictures in {FOLDER}")
