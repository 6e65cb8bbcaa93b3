"""PyTorch Lightning 2, with DistributedDataParallel and quantized gradients.

python ddp_lightning.py    # starts two workers itself; append another class of hvq to use it, such as EDEN
"""

import sys

import lightning
import torch

import horovod_quant.torch as hvq


class Quantized(lightning.Callback):
    """A callback that registers the hook, and keeps its counts in checkpoints."""

    def __init__(self, compression):
        self.compression = compression

    def load_state_dict(self, saved):
        self.compression.load_state_dict(saved)  # register() continues from it

    def on_train_start(self, trainer, module):
        self.state = hvq.ddp.register(trainer.strategy.model, self.compression)

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            accuracy, sent = trainer.callback_metrics["accuracy"].item(), self.state.stats().total
            print(f"{self.compression}: accuracy {accuracy:.1%}, {sent.ratio:.1f}x less traffic", flush=True)

    def state_dict(self):
        return self.state.state_dict()


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch, index):
        logits = self.net(batch[0])
        self.log("accuracy", (logits.argmax(1) == batch[1]).float().mean())
        return torch.nn.functional.cross_entropy(logits, batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    lightning.seed_everything(1)
    images = torch.randn(4096, 64)
    labels = (images @ torch.randn(64, 10)).argmax(1)
    data = torch.utils.data.TensorDataset(images, labels)
    trainer = lightning.Trainer(
        strategy="ddp", accelerator="cpu", devices=2, max_epochs=12, logger=False, enable_checkpointing=False,
        callbacks=[Quantized(getattr(hvq, sys.argv[1] if len(sys.argv) > 1 else "GlobalQSGD")())],
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=256))
