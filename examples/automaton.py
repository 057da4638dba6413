"""A neural cellular automaton that learns to grow a disc from one cell.

    python examples/automaton.py --quick
    python examples/automaton.py --n-steps 400 --memory "16 MiB" --tiers file:///scratch

Shows `unroll` on a cell of one's own: a small convolutional network is applied to a
grid again and again, with random cells left out at each step, and the loss looks at
the last grid alone.  Plain autograd keeps the graph of every step; here a limit
holds, whatever the number of steps, and the random numbers are the same when steps
are run again.  The first gradient is compared with plain autograd's.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import multistage.torch as mst


class Automaton(nn.Module):
    """One update of every cell from its neighbours; a state has shape (1, channels, n, n)."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.look = nn.Conv2d(channels, hidden, 3, padding=1)
        self.act = nn.Conv2d(hidden, channels, 1)
        nn.init.zeros_(self.act.weight)
        assert self.act.bias is not None
        nn.init.zeros_(self.act.bias)

    def forward(self, grid: Tensor, t: Tensor) -> Tensor:
        awake = (torch.rand(grid.shape[-2:]) < 0.6).to(grid.dtype)
        return grid + awake * self.act(torch.relu(self.look(grid)))


def plain(cell: Automaton, grid: Tensor, times: Tensor) -> Tensor:
    """Return the last grid as plain autograd computes it."""
    for t in times:
        grid = cell(grid, t)
    return grid


def gradients(cell: Automaton, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(cell.parameters())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n-steps", type=int, default=64, help="updates of the grid (64)")
    parser.add_argument("--size", type=int, default=32, help="cells each way (32)")
    parser.add_argument("--channels", type=int, default=12, help="numbers in a cell (12)")
    parser.add_argument("--updates", type=int, default=40, help="training updates (40)")
    parser.add_argument("--memory", default="4 MiB", help="limit for states and graphs (4 MiB)")
    parser.add_argument("--tiers", help="slow tier, such as file:///scratch (none)")
    parser.add_argument("--quick", action="store_true", help="a small grid, some seconds")
    args = parser.parse_args()
    if args.quick:
        args.n_steps, args.size, args.updates, args.memory = 32, 24, 6, "2 MiB"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cell = Automaton(args.channels, 4 * args.channels)
    place = torch.linspace(-1, 1, args.size)
    target = (place[:, None] ** 2 + place[None, :] ** 2 < 0.5).float()
    seed = torch.zeros(1, args.channels, args.size, args.size)
    seed[..., args.size // 2, args.size // 2] = 1
    times = torch.arange(args.n_steps)
    tiers = args.tiers or ()

    def loss_of(grid: Tensor) -> Tensor:
        return nn.functional.mse_loss(grid[0, 0], target)

    optimiser = torch.optim.Adam(cell.parameters(), lr=1e-3)
    losses = []
    for update in range(args.updates):
        torch.manual_seed(update)
        out = mst.unroll(cell, seed, times, memory=args.memory, tiers=tiers, outputs=None)
        loss = loss_of(out.state)
        found = gradients(cell, loss)
        if update == 0:
            print(out.plan)
        if update == 1:  # the first whose gradient is not mostly zeros
            torch.manual_seed(update)
            wanted = gradients(cell, loss_of(plain(cell, seed, times)))
            if not all(map(torch.equal, found, wanted)):
                raise SystemExit("the gradients differ")
        for parameter, gradient in zip(cell.parameters(), found, strict=True):
            parameter.grad = gradient / (gradient.norm() + 1e-8)
        optimiser.step()
        losses.append(loss.item())
        print(f"update {update + 1}: loss {losses[-1]:.4f}", flush=True)
    print(f"loss {losses[0]:.4f} at first, {min(losses):.4f} at best")
    print("The gradient equals that of plain autograd, bit for bit.")


if __name__ == "__main__":
    main()
