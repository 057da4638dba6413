"""A transformer trained within half the memory that it would take.

    python examples/transformer.py --quick
    python examples/transformer.py --blocks 24 --memory "40 MiB"

Shows `multistage.torch.compile`: it captures the model, chooses which activations
to keep and which operations to run again, and trains exactly as the plain model does,
dropout included.  Both are trained here; losses and parameters must be the same.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import multistage.torch as mst


class Embedding(nn.Module):
    """Characters and their places, as vectors; from (batch, length) to (batch, length, width)."""

    def __init__(self, characters: int, length: int, width: int) -> None:
        super().__init__()
        self.of = nn.Embedding(characters, width)
        self.at = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x) + self.at


def build(blocks: int, length: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True)
        for _ in range(blocks)
    ]
    return nn.Sequential(Embedding(128, length, width), *layers, nn.Linear(width, 128))


def train(model: nn.Module, text: Tensor, updates: int) -> list[Tensor]:
    """Return the losses of all updates (each to reverse the text), then the parameters."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for update in range(updates):
        torch.manual_seed(update)  # dropout draws the same in both trainings
        began = time.perf_counter()
        optimiser.zero_grad()
        scores = model(text)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), text.flip(1).flatten())
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
        seconds = time.perf_counter() - began
        print(f"  update {update + 1}: loss {loss.item():.4f}, {seconds:.2f} s", flush=True)
    return [*losses, *(p.detach() for p in model.parameters())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=12, help="transformer blocks (12)")
    parser.add_argument("--width", type=int, default=128, help="width of the model (128)")
    parser.add_argument("--length", type=int, default=128, help="characters in a text (128)")
    parser.add_argument("--batch", type=int, default=8, help="texts in a batch (8)")
    parser.add_argument("--updates", type=int, default=4, help="updates (4)")
    parser.add_argument("--memory", default="0.5", help="limit: bytes or a fraction (0.5)")
    parser.add_argument("--quick", action="store_true", help="a small model, some seconds")
    args = parser.parse_args()
    if args.quick:
        args.blocks, args.width, args.length, args.updates = 5, 32, 48, 2
    torch.set_num_threads(1)
    memory = float(args.memory) if args.memory.startswith("0.") else args.memory
    made = torch.Generator().manual_seed(1)
    text = torch.randint(0, 128, (args.batch, args.length), generator=made)

    print("plain autograd")
    plain = train(build(args.blocks, args.length, args.width), text, args.updates)
    print(
        f"within {args.memory} of its memory" if isinstance(memory, float) else f"within {memory}"
    )
    model = mst.compile(build(args.blocks, args.length, args.width), memory=memory)
    limited = train(model, text, args.updates)
    print(model.plan)
    if not all(map(torch.equal, plain, limited)):
        raise SystemExit("the gradients differ")
    print("Losses and parameters equal those of plain autograd, bit for bit.")


if __name__ == "__main__":
    main()
