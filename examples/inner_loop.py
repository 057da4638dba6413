"""Learning rates learnt by differentiating through the training they are used in.

    python examples/inner_loop.py --quick
    python examples/inner_loop.py --inner 2000 --memory "4 MiB" --tiers file:///scratch

An inner loop trains a small network by gradient descent with momentum.  The outer loop
looks at its validation loss at the end and takes the gradient by every learning rate
and by the weight decay.  A step of the inner loop contains a gradient itself; `unroll`
takes it like any other step, and inputs that require gradients get them.  The first
gradient is compared with that of plain autograd.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import multistage.torch as mst

Weights = dict[str, Tensor]
State = tuple[Weights, Weights]  # weights and their velocities


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points of the plane and a noisy wave over them."""
    x = torch.rand(count, 2, generator=(made := torch.Generator().manual_seed(seed))) * 2 - 1
    y = torch.sin(4 * x[:, :1]) * x[:, 1:] + 0.2 * torch.randn(count, 1, generator=made)
    return x, y


def error(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error of the network with weights w."""
    return ((torch.tanh(x @ w["A"] + w["a"]) @ w["B"] + w["b"] - y) ** 2).mean()


class InnerStep(torch.nn.Module):
    """One step of the inner training; its learning rate is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.log_decay = torch.nn.Parameter(torch.tensor(-9.0))
        self.x, self.y = data(128, seed=1)

    def forward(self, state: State, log_rate: Tensor) -> State:
        weights, velocities = state

        outer = torch.is_grad_enabled()  # not in sweeps whose graphs nobody needs
        with torch.enable_grad():
            weights = {
                name: w if w.requires_grad else w.detach().requires_grad_()
                for name, w in weights.items()
            }
            size = sum((weights[name] ** 2).sum() for name in ("A", "B"))
            loss = error(weights, self.x, self.y) + self.log_decay.exp() * size
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=outer)
        slope = dict(zip(weights, slopes, strict=True))
        velocities = {name: 0.8 * velocities[name] - slope[name] for name in weights}
        rate = log_rate.exp()
        return {name: weights[name] + rate * velocities[name] for name in weights}, velocities


def start(width: int) -> State:
    made = torch.Generator().manual_seed(0)
    shapes = {"A": (2, width), "a": (width,), "B": (width, 1), "b": (1,)}
    weights = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    weights["B"] = weights["B"] / width**0.5
    return weights, {name: torch.zeros_like(w) for name, w in weights.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inner", type=int, default=400, help="steps of the inner loop (400)")
    parser.add_argument("--outer", type=int, default=8, help="steps of the outer loop (8)")
    parser.add_argument("--width", type=int, default=64, help="width of the network (64)")
    parser.add_argument("--memory", default="4 MiB", help="limit for states and graphs (4 MiB)")
    parser.add_argument("--tiers", help="slow tier, such as file:///scratch (none)")
    parser.add_argument("--quick", action="store_true", help="a short loop, some seconds")
    args = parser.parse_args()
    if args.quick:
        args.inner, args.outer, args.width, args.memory = 60, 4, 32, "1 MiB"
    torch.set_num_threads(1)
    step = InnerStep()
    log_rates = torch.full((args.inner,), -4.5, requires_grad=True)
    learnt = [log_rates, step.log_decay]
    held_out = data(256, seed=2)
    optimiser = torch.optim.Adam(learnt, lr=0.2)
    losses = []
    for outer in range(args.outer):
        out = mst.unroll(
            step,
            start(args.width),
            log_rates,
            memory=args.memory,
            tiers=args.tiers or (),
            outputs=None,
        )
        loss = error(out.state[0], *held_out)
        gradients = torch.autograd.grad(loss, learnt)
        if outer == 0:
            print(out.plan)
            state = start(args.width)
            for log_rate in log_rates:
                state = step(state, log_rate)
            wanted = torch.autograd.grad(error(state[0], *held_out), learnt)
            if not all(map(torch.equal, gradients, wanted)):
                raise SystemExit("the gradients differ")
        for parameter, gradient in zip(learnt, gradients, strict=True):
            parameter.grad = gradient
        optimiser.step()
        losses.append(loss.item())
        print(f"outer step {outer + 1}: validation loss {losses[-1]:.5f}", flush=True)
    rates = log_rates.detach().exp()
    print(f"validation loss {losses[0]:.5f} at first, {min(losses):.5f} at best")
    print(f"learning rates from 0.0111 to between {rates.min():.4f} and {rates.max():.4f}")
    print("The gradient equals that of plain autograd, bit for bit.")


if __name__ == "__main__":
    main()
