"""Hugging Face's Trainer with quantized gradients: only its optimizer is wrapped.

horovodrun --gloo -np 2 python huggingface_trainer.py    # append another class of hvq to use it, such as EDEN

The Trainer knows nothing about Horovod. Each worker runs one on its share of the data, from the same model. Use --gloo:
under mpirun the Trainer would set up torch.distributed from MPI's variables, and average once more.
"""

import sys
import tempfile

import horovod.torch as hvd
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import horovod_quant.torch as hvq

hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)  # the workers share a machine

tokens = torch.randint(0, 64, [2048, 16])
data = [{"input_ids": row, "labels": row[0] % 2} for row in tokens]
train, test = data[:-256][hvd.rank() :: hvd.size()], data[-256:]

size = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 256}
config = BertConfig(**size, num_attention_heads=2, num_labels=2)
model = BertForSequenceClassification(config)
compression = getattr(hvq, sys.argv[1] if len(sys.argv) > 1 else "GlobalQSGD")()
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    named_parameters=model.named_parameters(),
    compression=compression,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=80,
        per_device_train_batch_size=32,
        max_grad_norm=0,  # clipping would come before averaging: see docs/examples.md
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model, arguments, train_dataset=train, optimizers=(optimizer, None))
    trainer.train()
    logits = trainer.predict(test).predictions

right = logits.argmax(1) == [int(each["labels"]) for each in test]
sent = compression.stats().total
if hvd.rank() == 0:
    print(f"{compression}: accuracy {right.mean():.1%}, {sent.ratio:.1f}x less traffic", flush=True)
