"""PyTorch Lightning's Horovod strategy with quantized gradients.

horovodrun --gloo -np 2 python lightning_horovod.py    # append another class of hvq to use it, such as EDEN

Eight lines pass the compressor to the strategy, which multiplies the learning rate by the number of workers.
"""

import sys

import horovod.torch as hvd
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import HorovodStrategy

import horovod_quant.torch as hvq


class QuantizedHorovod(HorovodStrategy):
    compression = None

    def _wrap_optimizers(self, optimizers, accumulate_grad_batches):
        names = [self._filter_named_parameters(self.lightning_module, each) for each in optimizers]
        common = {"backward_passes_per_step": accumulate_grad_batches, "compression": self.compression}
        return [
            hvd.DistributedOptimizer(each, named_parameters=named, **common)
            for each, named in zip(optimizers, names)
        ]


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)  # the workers share a machine
images = torch.randn(4096, 64)
labels = (images @ torch.randn(64, 10)).argmax(1)

model, strategy = Classifier(), QuantizedHorovod()
strategy.compression = getattr(hvq, sys.argv[1] if len(sys.argv) > 1 else "GlobalQSGD")()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = pl.Trainer(accelerator="cpu", strategy=strategy, max_epochs=4, enable_model_summary=False, **quiet)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 64)
trainer.fit(model, loader)  # Lightning gives each worker its share

accuracy = (model.layers(images).argmax(1) == labels).float().mean().item()
sent = strategy.compression.stats().total
if hvd.rank() == 0:
    print(f"{strategy.compression}: accuracy {accuracy:.1%}, {sent.ratio:.1f}x less traffic", flush=True)
