"""States and outputs that are views: a copy of one must make kernels round alike."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import multistage.torch as mst
from multistage.torch.tensors.checksums import checksum
from multistage.torch.tensors.states import Folded, Shape, copied

STEPS, BATCH, WIDTH = 12, 16, 33

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaps": lambda z: torch.stack([z, z], -1)[..., 0],
    "columns": lambda z: torch.cat([torch.zeros(BATCH, 3), z], 1)[:, 3:],
    "unaligned": lambda z: torch.cat([torch.zeros(1), z.flatten()])[1:].view_as(z),
    "repeated": lambda z: z[:1].expand(BATCH, WIDTH),
    "transposed": lambda z: z.t().contiguous().t(),
}
READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean(1, keepdim=True),
    "std": lambda h: h.std(),
    "gelu": F.gelu,
}


class Reader(nn.Module):
    def __init__(self, form: str, reader: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.form, self.reader = FORMS[form], READERS[reader]

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.form(torch.tanh(self.linear(x) + 0.3 * self.reader(h)))
        return h, h.sum()


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("form", "reader", "tier", "several"),
    [
        *itertools.product(FORMS, READERS, [False], [False]),
        *itertools.product(("gaps", "unaligned", "repeated"), ("std",), [True], [False, True]),
        *itertools.product(("gaps", "columns"), ("std",), [False], [True]),
    ],
)
def test_states_that_are_views(form: str, reader: str, tier: bool, several: bool) -> None:
    found = []
    for plain in (True, False):
        torch.manual_seed(1)
        cell = Reader(form, reader)
        start, x = FORMS[form](torch.randn(BATCH, WIDTH)), torch.randn(STEPS, BATCH, WIDTH)
        if plain:
            h, losses = start, []
            for t in range(STEPS):
                h, loss = cell(h, x[t])
                losses.append(loss)
            total: Any = sum(losses[1:], losses[0])
        else:
            how: dict[str, Any] = {"planner": "stream", "tiers": "memory:"} if tier else {}
            cells: Any = [cell] * STEPS if several else cell
            out = mst.unroll(
                cells, start, x, **{"planner": "recompute", "chunk": 3, "unequal": several, **how}
            )
            assert out.plan is not None and out.plan.planner == ("stream" if tier else "recompute")
            h, total = out.state, out.loss
        (total + h.sum()).backward()  # type: ignore[attr-defined]
        found.append([total, h, *(p.grad for p in cell.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64, torch.bool])
@pytest.mark.parametrize("form", [*FORMS, "empty", "conj", "neg"])
def test_a_copy_has_the_layout_of_its_original(form: str, dtype: torch.dtype) -> None:
    values = torch.arange(float(BATCH * WIDTH)).view(BATCH, WIDTH).to(dtype)
    if form in FORMS:
        tensor = FORMS[form](values) if dtype is torch.float32 else values[:, 1:-1:2]
    elif form == "empty":
        tensor = values[:0]
    else:
        tensor = torch.complex(values.real.float(), values.real.float())
        tensor = tensor.conj() if form == "conj" else tensor.conj().imag
    folded = Folded.of(tensor)
    assert folded.nbytes == tensor.numel() * tensor.element_size()
    for copy in (copied(tensor), folded.shape.on(folded.row)):
        assert torch.equal(copy, tensor)
        assert Shape.of(copy) == Shape.of(tensor)
        assert not tensor.numel() or copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int8])
def test_checksums_of_strided_rows(dtype: torch.dtype) -> None:
    row = torch.arange(12).to(dtype)
    assert checksum([row[::2]]) == checksum([row[::2].clone()]) != checksum([row[1::2]])


def test_checksums_of_nothing() -> None:
    """A view of no elements, of memory or of none."""

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h = torch.tanh(h + x)
        return h, {"none": h[:, :0], "loss": h.sum()}

    assert checksum([torch.ones(3)[:0]]) == checksum([torch.ones(0)])
    state = torch.zeros(2, 3, requires_grad=True)
    out = mst.unroll(cell, state, torch.ones(9, 2, 3), planner="recompute", outputs="last")
    assert out.plan is not None and out.plan.checked is not None
    assert out.plan.checked.outcome == "equal"


class Noted(torch.autograd.Function):
    """Passes a tensor on, and prints the strides of its gradient, which is no trace."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        sys.stdout.write(f"{gradients[0].stride()}\n")
        return gradients[0]


def noted(tensor: Tensor) -> Tensor:
    found: Tensor = Noted.apply(tensor)  # type: ignore[no-untyped-call]
    return found


def reduced(ys: list[Tensor], mode: str, *, fused: bool) -> Tensor:
    """Return what a plain loop makes of outputs."""
    if mode == "stack":
        return torch.cat(ys) if fused else torch.stack(ys)
    steps = [y for chunk in ys for y in chunk.unbind()] if fused else ys
    return steps[-1] if mode == "last" else sum(steps[1:], steps[0])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda y: y,
    "permuted": lambda y: y.transpose(-1, -2),
    "gaps": lambda y: torch.stack([y, y], -1)[..., 0],
    "expanded": lambda y: y.mean(-1, keepdim=True).expand(*y.shape[:-1], 5),
}


@pytest.mark.parametrize("how", [{"planner": "recompute"}, {"planner": "keep"}])
@pytest.mark.parametrize("steps", [1, STEPS, STEPS + 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["stack", "sum", "last"])
@pytest.mark.parametrize("fused", [False, True])
def test_outputs_and_their_gradients_have_the_strides_of_plain_autograd(
    fused: bool, mode: Any, layout: str, steps: int, how: Any, capsys: Any
) -> None:
    """Sums over them, as of the gradient of a bias, are rounded by how they lie in memory."""
    size, found = 3 if fused else 1, []

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ys = []
        for x_t in x if fused else x[None]:
            h = torch.tanh(h * weight + x_t)
            ys.append(h)
        return h, noted(LAYOUTS[layout](torch.stack(ys) if fused else h * 1) + bias)

    for plain in (True, False):
        torch.manual_seed(1)
        weight, bias = torch.ones(WIDTH, requires_grad=True), torch.zeros(1, requires_grad=True)
        h, x, ys = torch.randn(BATCH, WIDTH), torch.randn(steps, BATCH, WIDTH), []
        if plain:
            for t in range(0, steps, size):
                h, y = cell(h, x[t : t + size] if fused else x[t])
                ys.append(y)
            whole: Any = reduced(ys, mode, fused=fused)
        else:
            options = {**how, "chunk": size, "fused": fused, "check": "off"}
            whole = mst.unroll(cell, h, x, outputs=mode, **options).outputs
        capsys.readouterr()
        (whole * torch.randn(whole.shape)).sum().backward()
        found.append([whole, weight.grad, bias.grad, whole.stride(), capsys.readouterr().out])
    (*ours, strides, gradients), (*theirs, known, wanted) = found
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert strides == known
    assert gradients == wanted


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("steps", [1, 4, STEPS + 1])
def test_gradients_of_inputs_have_the_strides_of_plain_autograd(
    steps: int, fused: bool, capsys: Any
) -> None:
    size, found = 4 if fused else 1, []

    def cell(h: Tensor, x: Tensor) -> Tensor:
        for x_t in x if fused else x[None]:
            h = torch.tanh(h + x_t)
        return h

    for plain in (True, False):
        torch.manual_seed(1)
        data, bias = torch.randn(BATCH, WIDTH, steps), torch.zeros(WIDTH, requires_grad=True)
        h, x = torch.zeros(BATCH, WIDTH), noted((data + bias[:, None]).permute(2, 0, 1))
        if plain:
            for t in range(0, steps, size):
                h = cell(h, x[t : t + size] if fused else x[t])
        else:
            options: dict[str, Any] = {"planner": "recompute", "chunk": size, "fused": fused}
            h = mst.unroll(cell, h, x, outputs=None, **options).state
        capsys.readouterr()
        torch.autograd.backward(h.square().sum())
        found.append((bias.grad, capsys.readouterr().out))
    assert torch.equal(found[0][0], found[1][0])  # type: ignore[arg-type]
    assert found[0][1] == found[1][1]
