"""An LSTM in PyTorch on long sequences, trained by two processes (DistributedDataParallel).

    python examples/lstm_ddp.py --quick
    python examples/lstm_ddp.py --n-steps 4000 --memory "2 MiB" --tiers file:///scratch

Shows `unroll` inside a module that DDP wraps: each process runs its own sequences
within a memory limit, states streaming to a file, and gradients are averaged as ever.
The same training is done by plain autograd; losses and parameters must be the same.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn

import multistage.torch as mst


class Echo(nn.Module):
    """Predicts, at each time step, the number that came some steps before."""

    def __init__(self, width: int, memory: str | None, tier: str = "") -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(1, width)
        self.head = nn.Linear(width, 1)
        self.memory, self.tier = memory, tier
        self.plan: object = None

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        def cell(state: tuple[Tensor, Tensor], t: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
            h, c = self.lstm(x[int(t)], state)
            return (h, c), nn.functional.mse_loss(self.head(h), wanted[int(t)])

        h = x.new_zeros(x.shape[1], self.lstm.hidden_size)
        state, times = (h, h.clone()), torch.arange(len(x))
        if self.memory is None:  # plain autograd
            loss = x.new_zeros(())
            for t in times:
                state, term = cell(state, t)
                loss = loss + term
            return loss / len(x)
        out = mst.unroll(
            cell,
            state,
            times,
            memory=self.memory,
            tiers=self.tier,
            parameters=list(self.parameters()),
        )
        self.plan = out.plan
        assert out.loss is not None
        return out.loss / len(x)


def train(rank: int, args: argparse.Namespace, memory: str | None) -> list[Tensor]:
    """Return the losses of all updates, then the parameters."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        model = Echo(args.width, memory, args.tiers or f"file:{scratch}")
        parallel = nn.parallel.DistributedDataParallel(model)
        optimiser = torch.optim.Adam(parallel.parameters(), lr=0.02)
        results = []
        for update in range(args.updates):
            seed = torch.Generator().manual_seed(100 * update + rank)  # sequences of its own
            x = torch.rand(args.n_steps, args.batch, 1, generator=seed)
            optimiser.zero_grad()
            loss = parallel(x, x.roll(3, 0))
            loss.backward()
            optimiser.step()
            if rank == 0:
                print(f"  update {update + 1}: loss {loss.item():.4f}", flush=True)
            results.append(loss.detach())
        if rank == 0 and memory is not None:
            print(model.plan)
    return [*results, *(p.detach() for p in model.parameters())]


def worker(rank: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.processes)
    try:
        results = []
        for what, memory in (("plain autograd", None), (f"within {args.memory}", args.memory)):
            if rank == 0:
                print(f"{what}, {args.processes} processes", flush=True)
            results.append(train(rank, args, memory))
        equal = torch.tensor([all(map(torch.equal, *results))], dtype=torch.int32)
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        if not equal.item():
            raise SystemExit("the gradients differ")
        if rank == 0:
            print("Losses and parameters equal those of plain autograd, bit for bit.")
        dist.barrier()  # gloo aborts when one leaves while others talk
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="on this machine (2)")
    parser.add_argument("--n-steps", type=int, default=1_500, help="length of a sequence (1500)")
    parser.add_argument("--width", type=int, default=64, help="width of the layer (64)")
    parser.add_argument("--batch", type=int, default=16, help="sequences a process (16)")
    parser.add_argument("--updates", type=int, default=4, help="updates (4)")
    parser.add_argument("--memory", default="1 MiB", help="limit of a process (1 MiB)")
    parser.add_argument("--tiers", help="slow tier (a folder for temporary files)")
    parser.add_argument("--quick", action="store_true", help="short sequences, some seconds")
    args = parser.parse_args()
    if args.quick:
        args.n_steps, args.width, args.updates, args.memory = 300, 32, 2, "256 KiB"
    with socket.socket() as free:  # a port for the processes to meet at
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    torch.multiprocessing.spawn(worker, (args,), nprocs=args.processes)


if __name__ == "__main__":
    main()
