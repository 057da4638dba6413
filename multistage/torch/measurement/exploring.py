"""What the stages of a chain do besides computing: what they change, draw and share.

Found by running each once, on a sample, and leaving all as it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules_of_torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ..environment.captured import Environment, exchanges_memory, generators_of
from ..environment.copies import cloned
from ..environment.randomness import Generators, State
from ..environment.scope import Scope
from ..environment.states import tensors_in, wants_of, with_tensors
from ..environment.turns import is_looking
from ..tensors.checksums import same_bits
from ..tensors.graphs import nodes_below
from ..tensors.meter import Operations, storages_among, storages_of
from ..tensors.sums import Sums
from .saved import Saved
from .traits import OfGraph, Traits

Call: TypeAlias = Callable[..., object]  # of a state
Hook: TypeAlias = Callable[[Tensor], Tensor | None]
_State = TypeVar("_State")
_CHECKING = f"{__package__}.checking"
this_pass = torch._C._current_graph_task_id  # of the backward at work in this thread
_OF_PARTS: set[int] = set()  # passes at work, of all threads, that users' hooks are not to see
_FILLS = ("RreluWithNoiseBackward",)  # the slopes that random leaky ReLU draws


def fresh_copy(state: _State, *, wants: bool | None = None) -> _State:
    """Return a state of fresh leaves, writable, with the same wishes for gradients."""

    def made(given: list[Tensor]) -> list[Tensor]:
        copies = cloned(given)  # with their strides, which decide what kernels run and copy
        for tensor, copy in zip(given, copies, strict=True):
            may = tensor.is_floating_point() or tensor.is_complex()
            copy.requires_grad_(may and (tensor.requires_grad if wants is None else wants))
        return copies

    return with_tensors(state, made)


@contextlib.contextmanager
def hooks_silent(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run without the backward hooks of some modules."""
    modules = list(modules)
    own = {id(module) for module in modules}
    tables: list[dict[Any, Any]] = [
        table for m in modules for table in (m._backward_hooks, m._backward_pre_hooks)
    ]
    tables += [modules_of_torch._global_backward_hooks, modules_of_torch._global_backward_pre_hooks]
    before = [(table, dict(table)) for table in tables if table]
    for table, hooks in before:
        for key, hook in hooks.items():
            table[key] = _but_of(own, hook)
    try:
        yield
    finally:
        for table, hooks in before:
            for key, hook in hooks.items():
                if key in table:
                    table[key] = hook


def _but_of(modules: set[int], hook: Callable[..., Any]) -> Callable[..., Any]:
    def called(module: nn.Module, *given: Any) -> Any:
        return None if id(module) in modules else hook(module, *given)

    return called


class _SeesWhole:
    """A user's hook that is not called with gradients of parts, of trials, nor with none.

    It stays in the hook's place, for passes of other threads meet it meanwhile.
    """

    def __init__(self, hook: Hook) -> None:
        functools.update_wrapper(self, hook)
        self.hook = hook
        # Counts its calls, so that those without a gradient are no fewer.
        self._counts = _module_of(hook) == torch.autograd.graph.__name__

    def __call__(self, gradient: Tensor | None) -> Any:
        """Call the hook, as autograd does."""
        if this_pass() in _OF_PARTS or is_looking() or (gradient is None and not self._counts):
            return None
        return cast(Callable[[Tensor | None], Any], self.hook)(gradient)


def let_see_wholes(tensors: Iterable[Tensor]) -> None:
    """Keep the hooks that tensors have from seeing gradients of parts, or none."""
    for tensor in tensors:
        hooks: dict[int, Callable[..., Any]] = tensor._backward_hooks or {}
        for key, hook in hooks_of(tensor).items():
            if isinstance(hooks.get(key), _SeesWhole):
                continue
            sees_whole = _SeesWhole(hook)
            # Nothing is called in between, where another thread might remove it.
            if key in hooks:
                hooks[key] = sees_whole


@contextlib.contextmanager
def without_hooks(
    parameters: Sequence[Tensor], roots: Sequence[tuple[Tensor, Tensor | None]]
) -> Iterator[list[tuple[Tensor, Tensor | None]]]:
    """Keep the users' hooks from seeing the gradient of a part: they see the whole, once.

    So does `.grad` of a tensor that is no leaf and retains its gradient.  The part is the pass
    from the roots that are returned; other passes, as in other threads, call the hooks.
    """
    let_see_wholes(parameters)
    begun = list(roots)
    if hooked := any(map(hooks_of, parameters)):
        # By a node of its own, which no other pass has; hooks of a root would be called before it.
        begun = Sums([t for t, _ in roots]).roots([g for _, g in roots])
    del roots  # which may hold the gradients no longer
    passes: set[int] = set()

    def note(_: object) -> None:
        passes.add(this_pass())
        _OF_PARTS.add(this_pass())

    nodes = [t.grad_fn for t, _ in begun if hooked]
    handles = [node.register_prehook(note) for node in nodes if node is not None]
    del nodes
    retained = [(p, p.grad) for p in parameters if p.retains_grad]
    for parameter, _ in retained:
        parameter.grad = None
    try:
        yield begun
    finally:
        _OF_PARTS.difference_update(passes)
        for handle in handles:
            handle.remove()
        for parameter, gradient in retained:
            parameter.grad = gradient


def hooks_of(tensor: Tensor) -> dict[int, Hook]:
    """Return the hooks that users have set, not those of a check, maybe in another thread."""
    hooks = list((tensor._backward_hooks or {}).items())
    return {key: users(hook) for key, hook in hooks if _module_of(hook) != _CHECKING}


def users(hook: Hook) -> Hook:
    """Return a hook as the user has set it."""
    return hook.hook if isinstance(hook, _SeesWhole) else hook


def _module_of(hook: object) -> str:
    return getattr(hook, "__module__", None) or ""


class HooksOnTensors(TorchFunctionMode):
    """Ignores hooks that stages set on tensors while they are profiled, in this thread.

    Attributes
    ----------
    met : bool
        Whether a stage has set one: else stages are timed without this mode, which takes time.
    """

    met = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is Tensor.register_hook:
            self.met = True
            return RemovableHandle(OrderedDict())
        return func(*args, **(kwargs or {}))


def explore(
    stages: Sequence[Call], names: Sequence[str], sample: object
) -> tuple[tuple[tuple[int, ...], ...], tuple[Traits, ...]]:
    """Run all stages once; find what they change and which must be joined.

    A stage that writes to its input changes every earlier state that shares
    the storage, through views or stages that pass it on: all stages from the
    one that made the storage are joined.
    """
    state = fresh_copy(sample, wants=False)
    scopes = [Scope([stage]) for stage in stages]
    # References keep the addresses of storages from being used again.
    storages = [_storages(state)]
    starts = list(range(len(stages)))  # the first stage of the group that stage i is in
    traits: list[Traits] = []
    changes_first = False
    wants: Sequence[bool] | None = wants_of(tensors_in(sample))  # gradients; None if not known
    moved: set[int] = set()  # storages of buffers that some stage changes
    for i, stage in enumerate(stages):
        inputs = tensors_in(state)
        versions = [tensor._version for tensor in inputs]
        # By value: batch norm's kernels change statistics behind the versions' back.
        buffers = [(m, k, b, b._version, b.detach().clone()) for m, k, b in scopes[i].buffers()]
        around = Environment(scopes[i], f"stage {names[i]}", [(m, k) for m, k, *_ in buffers])
        generators = generators_of([scopes[i]], inputs)
        random = generators.capture()
        leaves, spec = pytree.tree_flatten(state)
        given = pytree.tree_unflatten(leaves, spec)  # the stage may change lists and dicts
        is_pure = isinstance(stage, OfGraph) and stage.is_pure
        with torch.no_grad(), Operations() if is_pure else contextlib.nullcontext() as done:
            state = stage(state)
        after = generators.capture()
        around.drew(generators, random, after)
        around.verify()
        changed = [
            (m, k, b)
            for m, k, b, version, value in buffers
            if m._buffers[k] is not b or b._version != version or not same_bits(b, value)
        ]
        moved |= storages_among(b for *_, b in changed).keys()
        pairs = zip(inputs, versions, strict=True)
        written = {*storages_among(t for t, version in pairs if t._version != version)}
        if written:
            maker = _maker_of(written, storages[: i + 1])
            changes_first = changes_first or maker < 0
            for k in range(max(maker, 0), i + 1):
                starts[k] = starts[max(maker, 0)]
        storages.append(_storages(state))
        trait = Traits(
            names[i],
            tuple([(m, k) for m, k, _ in changed]),
            frozenset(generators.drawn(random, after)),
            is_pure=is_pure,
            scope=scopes[i],
        )
        look = partial(_look_with_graph, stage, given, wants, state, done, around)
        # What was written to cannot be run on again.
        found = (trait, None) if written else look(generators, random, trait)
        traits.append(found[0])
        wants = found[1]
    traits = [_keeping(trait, s, moved) for trait, s in zip(traits, scopes, strict=True)]
    traits[0] = replace(traits[0], changes_input=changes_first)
    return _groups(starts, stages, traits)


def _keeping(trait: Traits, scope: Scope, moved: Set[int]) -> Traits:
    """Return traits of a stage that also keeps the buffers which it reads and another changes."""
    shared = [(m, k) for m, k, b in scope.buffers() if storages_of(b).keys() & moved]
    more = [each for each in shared if each not in trait.buffers]
    return replace(trait, buffers=(*trait.buffers, *more))


def _maker_of(written: set[int], storages: Sequence[dict[int, StorageWeakRef]]) -> int:
    """Return the stage that made storages which the last state has; -1 for those of state 0."""
    i = len(storages) - 1
    while i >= 0 and storages[i].keys() & written:
        i -= 1
    return i


def _look_with_graph(
    stage: Call,
    given: object,
    wants: Sequence[bool] | None,
    result: object,
    done: Operations | None,
    around: Environment,
    generators: Generators,
    states: Sequence[State],
    trait: Traits,
) -> tuple[Traits, Sequence[bool]]:
    """Run a stage with a graph, and compare: some kernels, such as oneDNN's LSTM, differ.

    Where what it saves is not compared later, operations are compared, too: other kernels may
    have given the same numbers by chance, as where they are multiplied by a zero.

    The generators that it left as they were have other states then: it may have drawn
    numbers and put back the state, or seeded a generator with the state that it had.

    Returns
    -------
    trait : Traits
    wants : sequence of bool
        Which tensors of its result require gradients.
    """
    drawn, seeded = trait.draws, set[str]()
    plain = tensors_in(result)
    recorded = None if done is None else Operations()

    def run(disturbed: AbstractContextManager[object]) -> list[Tensor]:
        if recorded is not None:
            recorded.noted.clear()
        noting = recorded or contextlib.nullcontext()
        with around.again(), disturbed, torch.enable_grad(), noting:
            return tensors_in(stage(_wanting(given, wants)))

    # Lengths of nested tensors have names, which are others each time they are made.
    unhooked = any(t.is_nested for t in (*plain, *tensors_in(given)))
    saved = Saved()
    try:
        with saved:
            again = run(generators.disturbed(states, drawn, seeded))
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):  # which torch.func does not support
            raise
        unhooked = True
        again = run(generators.disturbed(states, drawn, seeded))
    graded, may_draw = False, recorded is None or recorded.may_draw
    # Ranks that run a stage together run it as often.
    if exchanges_memory() or not _all_equal(plain, again):
        # Twice: hidden state would make a stage differ from itself.
        undisturbed, once_more = (run(contextlib.nullcontext()) for _ in range(2))
        graded = not _all_equal(plain, undisturbed)
        if _all_equal(undisturbed, once_more) and not _all_equal(undisturbed, again):
            seeded |= {*generators.names} - drawn
    if done is not None and recorded is not None:
        graded = graded or recorded.noted != done.noted
        may_draw = may_draw or done.may_draw
    trait = replace(
        trait,
        draws=drawn | seeded,
        may_draw=may_draw or bool(drawn | seeded),
        graded=graded,
        differentiates=saved.is_asked,
        unhooked=unhooked or any(t.is_nested for t in saved.held()),
        fills=has_node(again, _FILLS),
    )
    return trait, wants_of(again)


def has_node(result: Sequence[Tensor], names: tuple[str, ...]) -> bool:
    """Whether a graph has nodes whose names begin in one of these ways."""
    return any(node.name().startswith(names) for node in nodes_below(result))


def _all_equal(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(ones) == len(others) and all(
        a.device.type == "meta" or (a.shape == b.shape and same_bits(a, b))
        for a, b in zip(ones, others, strict=True)
    )


def _wanting(state: object, wants: Sequence[bool] | None) -> object:
    """Return a state without copies whose tensors require gradients as said, or where they can."""
    left = None if wants is None else iter(wants)

    def leaf(tensor: Tensor) -> Tensor:
        may = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_(may if left is None else next(left))

    return pytree.tree_map_only(Tensor, leaf, state)


def _storages(state: object) -> dict[int, StorageWeakRef]:
    found = storages_among(tensors_in(state))
    return {key: StorageWeakRef(storage) for key, storage in found.items()}


def _groups(
    starts: list[int], stages: Sequence[Call], traits: Sequence[Traits]
) -> tuple[tuple[tuple[int, ...], ...], tuple[Traits, ...]]:
    groups: list[list[int]] = []
    for i, start in enumerate(starts):
        if groups and start <= groups[-1][-1] and start != i:
            groups[-1].append(i)
        else:
            groups.append([i])
    return tuple(tuple(group) for group in groups), tuple(
        traits[group[0]]
        if len(group) == 1
        else Traits.together(
            "+".join(traits[i].name for i in group),
            [traits[i] for i in group],
            Scope([stages[i] for i in group]),
        )
        for group in groups
    )
