"""Train a small character transformer with quantized gradients.

    horovodrun -np 4 python examples/torch_char_transformer.py --compression global-qsgd --bits 8
    horovodrun -np 2 python examples/torch_char_transformer.py --device cuda --compression global-qsgd --bits 8

The text is the sources of Python's library. An ordinary Horovod training script: horovod_quant only appears as the
argument ``compression`` of the DistributedOptimizer. Works with any number of workers, including a single one without
horovodrun.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import horovod.torch as hvd
import torch
import training
from python_text import CHARACTERS, Text, load_text
from torch import nn

import horovod_quant.torch as hvq
from horovod_quant.bench import devices

# Chosen for float32 gradients and Adam, and the same for every compression. That of BinSGDM is the step of every
# element.
LEARNING_RATES = {"adam": 0.006, "binsgdm": 0.005}

WARM_UP = 0.1  # the share of the steps in which the learning rate rises
VALIDATION_SEQUENCES = 256


class CharTransformer(nn.Module):
    """A transformer that predicts the next character from those before it.

    Args:
        layers, width, heads: of the transformer.
        context: characters that it sees.
    """

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Embedding(context, width)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CHARACTERS)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False
        )

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """Return logits ``[sequence, position, character]`` of the next characters.

        Args:
            sequences: character codes, ``[sequence, position]``.
        """
        length = sequences.shape[1]
        embedded = self.characters(sequences) + self.positions.weight[:length]
        return self.head(self.blocks(embedded, mask=self.mask[:length, :length], is_causal=True))

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of windows, in nats.

        Windows are ``[sequence, context + 1]``.
        """
        logits = self(windows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class ThroughHost:
    """One of Horovod's compressions, for gradients of a GPU.

    For a Horovod that can reduce only tensors of the host.
    """

    def __init__(self, compression: Any) -> None:
        self._compression = compression

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        compressed, context = self._compression.compress(tensor)
        return compressed.cpu(), (context, compressed.device)

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        own, device = context
        return self._compression.decompress(tensor.to(device), own)


def make_compression(args: argparse.Namespace, seed: int) -> Any:
    compression = training.make_compression(args, seed, hvd, hvq)
    if args.device == "cpu" or args.compression in training.COMPRESSORS:
        return compression
    everywhere = not any(hvd.allgather_object(devices.reduction_problem(hvd)))
    return compression if everywhere else ThroughHost(compression)


def make_optimizer(args: argparse.Namespace, model: nn.Module, seed: int) -> torch.optim.Optimizer:
    if args.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    return hvq.optim.BinSGDM(model.parameters(), lr=args.lr, beta=0.9, seed=seed)


def schedule(progress: float) -> float:
    """Return the learning rate's factor after a share of the steps.

    A linear warm-up, then half a cosine down to 0.
    """
    if progress < WARM_UP:
        return progress / WARM_UP
    return (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))) / 2


def windows_at(text: torch.Tensor, starts: torch.Tensor, context: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(context + 1)]


@torch.no_grad()
def validate(model: CharTransformer, text: torch.Tensor, context: int) -> float:
    """Return the loss on fixed windows spread over the text.

    Each worker computes its share of them.
    """
    starts = torch.linspace(0, len(text) - context - 1, VALIDATION_SEQUENCES).long()[hvd.rank() :: hvd.size()]
    losses = [float(model.loss(windows_at(text, part, context))) * len(part) for part in starts.split(16)]
    return sum(hvd.allgather_object(sum(losses))) / VALIDATION_SEQUENCES


def train(args: argparse.Namespace, seed: int, data: Text) -> dict[str, Any]:
    """Train once; return the figures."""
    torch.manual_seed(seed)
    model = CharTransformer(args.layers, args.width, args.heads, args.context)
    # Before it is on a GPU, from which a Horovod that was built for the host alone could not send it.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model.to(args.device)
    train_text, validation_text = (torch.from_numpy(text).to(args.device) for text in data)
    sampling = torch.Generator().manual_seed(hvd.size() * seed + hvd.rank())

    compression = make_compression(args, seed)
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(args, model, seed), named_parameters=model.named_parameters(), compression=compression
    )
    if args.device == "cpu":  # a new optimizer's state is the same on all workers: on a GPU it can stay there
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule((step + 1) / args.steps))

    parameters = sum(parameter.numel() for parameter in model.parameters())
    with training.Record(args, seed, args.steps, compression, parameters, hvd) as record:
        for _ in range(args.steps):
            starts = torch.randint(
                len(train_text) - args.context, (args.batch_size // hvd.size(),), generator=sampling
            )
            optimizer.zero_grad()
            loss = model.loss(windows_at(train_text, starts, args.context))
            loss.backward()
            optimizer.step()
            rate.step()
            record.step(loss.item())

    quality = {"validation_loss": validate(model, validation_text, args.context)}
    return record.figures(quality, [parameter.detach().cpu().numpy() for parameter in model.parameters()])


def describe(run: dict[str, Any]) -> str:
    return f"validation loss {run['validation_loss']:.4f}"


def make_parser(hvd: Any) -> training.Parser:
    parser = training.make_parser(
        "torch_char_transformer.py", "Train on text with quantized gradients.", LEARNING_RATES, "adam", hvd
    )
    add = parser.add_argument
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where to train; workers can share a GPU (cpu)",
    )
    add("--steps", type=int, default=1000, help="(1000)")
    add("--batch-size", type=int, default=32, help="sequences per step, over all workers (32)")
    add("--context", type=int, default=32, help="characters of a sequence (32)")
    add("--layers", type=int, default=2, help="(2)")
    add("--width", type=int, default=64, help="(64)")
    add("--heads", type=int, default=4, help="(4)")
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(hvd)
    args = training.parse_arguments(parser, LEARNING_RATES, "adam", hvd, hvq)
    for name in ("steps", "context", "layers", "width", "heads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: use at least 1")
    if args.batch_size < hvd.size():
        parser.error(f"--batch-size {args.batch_size}: use at least {hvd.size()}, a sequence per worker")
    if args.width % args.heads:
        parser.error(f"--width {args.width}: use a multiple of --heads {args.heads}")
    if args.device == "cuda":
        problem = next(filter(None, hvd.allgather_object(devices.gpu_problem())), None)
        if problem:
            parser.error(f"--device cuda: {problem}")
        devices.take_gpu(hvd)
    return args


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)  # several workers share a machine
    args = parse_arguments()
    data = load_text()
    training.train_all(args, lambda seed: train(args, seed, data), describe, hvd)


if __name__ == "__main__":
    main()
