"""States and outputs that are views: a copy of one must make kernels round alike."""

from __future__ import annotations

import itertools
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
