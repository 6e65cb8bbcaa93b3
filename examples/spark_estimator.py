"""horovod.spark's TorchEstimator with quantized gradients: it passes gradient_compression to its workers.

python spark_estimator.py    # append another class of hvq to use it, such as EDEN

The estimator multiplies the learning rate by the number of workers. The estimators for Keras and for PyTorch Lightning
ignore the compressor that they are given: see docs/examples.md.
"""

import os
import sys
import tempfile

import torch
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator
from pyspark.sql import SparkSession

import horovod_quant.torch as hvq

WORKERS = 2
compression = getattr(hvq, sys.argv[1] if len(sys.argv) > 1 else "GlobalQSGD")()

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.master(f"local[{WORKERS}]").config("spark.ui.enabled", "false").getOrCreate()
torch.manual_seed(1)
images = torch.randn(4096, 64)
labels = (images @ torch.randn(64, 10)).argmax(1)
rows = [(image.tolist(), float(label)) for image, label in zip(images, labels)]
table = spark.createDataFrame(rows, "image array<float>, label float").repartition(2 * WORKERS)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))


def fewer_bytes(_output, _label):  # a metric: only the workers' copies have counts
    return torch.tensor(compression.stats().total.ratio)


with tempfile.TemporaryDirectory() as folder:
    estimator = TorchEstimator(
        backend=SparkBackend(WORKERS, env={**os.environ, "OMP_NUM_THREADS": "1"}, use_gloo=True, verbose=0),
        store=Store.create(folder, save_runs=False),  # metrics of saved runs: see docs/examples.md
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        loss=lambda output, label: torch.nn.functional.cross_entropy(output, label.long()),
        metrics=[[fewer_bytes]],
        gradient_compression=compression,
        feature_cols=["image"], label_cols=["label"], input_shapes=[[-1, 64]],
        batch_size=64, epochs=4, random_seed=1, use_gpu=False, verbose=0,
    )  # fmt: skip
    trained = estimator.fit(table)
spark.stop()

accuracy = (trained.getModel()(images).argmax(1) == labels).float().mean().item()
((ratio,),) = (group.values() for group in trained.getHistory()[-1]["train"]["all_metrics"])
print(f"{compression}: accuracy {accuracy:.1%}, {ratio:.1f}x less traffic", flush=True)
