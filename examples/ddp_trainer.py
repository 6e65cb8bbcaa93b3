"""Hugging Face's Trainer, with DistributedDataParallel and quantized gradients.

torchrun --nproc-per-node 2 ddp_trainer.py    # append another class of hvq to use it, such as EDEN

The Trainer wraps the model itself, with the help of Accelerate, which lets a handler register a hook.
"""

import gc
import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import horovod_quant.torch as hvq

compression = getattr(hvq, sys.argv[1] if len(sys.argv) > 1 else "GlobalQSGD")()


class Quantized(DistributedDataParallelKwargs):
    """A handler that registers the hook on the model wrapped by Accelerate."""

    def register_comm_hook(self, model):
        self.state = hvq.ddp.register(model, compression)


torch.manual_seed(1)
torch.set_num_threads(1)  # the workers share a machine
tokens = torch.randint(0, 64, [2048, 16])
data = [{"input_ids": row, "labels": row[0] % 2} for row in tokens]
train, test = data[:-256], data[-256:]

size = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 256}
model = BertForSequenceClassification(BertConfig(**size, num_attention_heads=2, num_labels=2))

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=80,
        learning_rate=1e-3,
        per_device_train_batch_size=32,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model, arguments, train_dataset=train)
    handler = trainer.accelerator.ddp_handler = Quantized()
    trainer.train()
    logits = trainer.predict(test).predictions

right = logits.argmax(1) == [int(each["labels"]) for each in test]
sent = handler.state.stats().total
if dist.get_rank() == 0:
    print(f"{compression}: accuracy {right.mean():.1%}, {sent.ratio:.1f}x less traffic", flush=True)
del trainer, model
gc.collect()  # PyTorch with Gloo may abort at exit where a model outlives the process group
dist.destroy_process_group()
