"""Programs that once ended with other numbers or an error that was not ours."""

from __future__ import annotations

from .programs import Case

CORPUS: dict[str, Case] = {
    "gradients left by profiling functions": Case(
        32, "sequential", ("Dense", "Dense"), memory=0.3, closures=True
    ),
    "batch norm in functions": Case(
        32, "sequential", ("Conv", "GroupNorm", "BatchNorm", "Dense"), closures=True, flow="pair"
    ),
    "other parameters between forward and backward": Case(
        14, "sequential", ("GroupNorm", "Dense"), wants=True, between=("assign",)
    ),
    "a parameter written to in forward": Case(
        2, "sequential", ("Renormalised", "Dense"), memory=0.85, steps=2, call="functional"
    ),
    "own generators": Case(67, "sequential", ("OwnNoise", "Dense", "Dense"), memory=0.7),
    "draws that begin late": Case(52, "unroll", ("LateDraw",), wants=True, chunk=1, length=5),
    "differentiates in forward": Case(
        3, "unroll", ("Penalised",), check="error", memory=0.3, wants=True, inputs="list"
    ),
    "batch norm in a function that is a cell": Case(
        22, "unroll", ("BatchNorm",), memory=0.7, closures=True, chunk=2
    ),
    "a cell frozen before backward": Case(
        29, "unroll", ("Dense",), memory=0.7, between=("freeze",), chunk=1
    ),
    "state that profiling moves and nothing puts back": Case(
        2067, "sequential", ("Hidden", "Dense"), check="error"
    ),
    "reentrant checkpoint in a cell": Case(2050, "unroll", ("Reentrant",), chunk=3),
    "sparse gradients of a cell": Case(2072, "unroll", ("Sparse",), chunk=3),
}
