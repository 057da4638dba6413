"""Modules that a graph calls whole: torch's own, and those that do what a graph cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..environment.holders import is_same
from .called import boxed_in, cut_off, unboxed
from .frames import Frames
from .nodes import Nodes
from .recorded import MODEL, RANDOM, UnrecordableError
from .storages import registered_in
from .vocabulary import tensors_in
from .watching import has_hooks

# Containers of other layers whose forward is a loop over them.
_OPENED = (nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)


class WholeModules:
    """Calls modules whole, each a node of the graph.

    Parameters
    ----------
    nodes : Nodes
    frames : Frames
    modules : sequence of nn.Module
        All of the model.
    closed : dict
        Paths of modules that a graph cannot hold, with the cause; more are found.
    kinds : set of type
        Classes of which all modules are called whole.

    Attributes
    ----------
    called : set of str
        Paths of the modules called so far.
    """

    def __init__(
        self,
        nodes: Nodes,
        frames: Frames,
        modules: Sequence[nn.Module],
        closed: dict[str, str],
        kinds: set[type],
    ) -> None:
        self._nodes, self._frames = nodes, frames
        self._closed, self._kinds = closed, kinds
        self._registered = {module: registered_in(module) for module in modules}
        self.called: set[str] = set()

    def wants(self, module: nn.Module, path: str) -> bool:
        """Whether a module is called whole."""
        if path in self._closed or type(module) in self._kinds:
            self._closed.setdefault(path, "as others of its class")
            return True
        if has_hooks(module) or isinstance(module, torch.jit.ScriptModule):
            return True
        home = type(module).__module__
        return home.startswith(("torch.nn.", "torch.ao.", "torch._dynamo.")) and not isinstance(
            module, _OPENED
        )

    def call(
        self,
        plain: Callable[..., object],
        module: nn.Module,
        path: str,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Call a module by `plain(module, ...)`, and record the call as a node."""
        nodes = self._nodes
        self._refuse_substitutes(module, path)
        self.called.add(path)
        modes = self._frames.modes()
        given = tuple(nodes.argument(x) for x in args)
        named = {key: nodes.argument(value) for key, value in kwargs.items()}
        tensors = tensors_in((args, kwargs))
        versions = [t._version for t in tensors]
        if path in self._closed:
            result = self._apart(plain, module, args, kwargs)
        else:
            result = plain(module, *args, **kwargs)
        self._registered |= {each: registered_in(each) for each in module.modules()}
        self._frames.allow_draws()
        written = [t for t, v in zip(tensors, versions, strict=True) if t._version != v]
        nodes.wrote(written, MODEL | RANDOM)
        for leaf in pytree.tree_leaves(result):
            if leaf is not None and not isinstance(leaf, Tensor):
                raise UnrecordableError(
                    path, f"returns a value of type {type(leaf).__name__}, not tensors alone"
                )
        node = nodes.graph.create_node("call_module", path, given, named)
        nodes.note(node, result, MODEL | RANDOM, modes)
        return result

    def _apart(
        self,
        plain: Callable[..., object],
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Call a module with a graph of its own, in which it may differentiate what it computes."""
        kept = [(p, p._version, p.detach().clone()) for p in module.parameters()]
        boxes: list[list[Tensor]] = []
        with torch.autograd.graph.saved_tensors_hooks(boxed_in(boxes), unboxed):
            result = plain(module, *args, **kwargs)
        for box in boxes:  # or an output that its own node keeps is never freed
            box.clear()
        result = pytree.tree_map(cut_off, result)
        self._refuse_changed(kept)
        return result

    def _refuse_substitutes(self, module: nn.Module, path: str) -> None:
        """Refuse tensors in place of a module's own, with which the graph would call it."""
        for each in module.modules():
            known = self._registered.get(each)
            if known is not None and not is_same(known, registered_in(each)):
                raise self._frames.refused(
                    f"calls {path} with other parameters or buffers than its own, as "
                    "torch.func.functional_call does"
                )

    def _refuse_changed(self, kept: Sequence[tuple[Tensor, int, Tensor]]) -> None:
        """Put parameters back that a module wrote to; refuse the model if there are any."""
        changed = [(p, value) for p, version, value in kept if p._version != version]
        for parameter, value in changed:
            with torch.no_grad():
                parameter.copy_(value)
        if changed:
            raise self._nodes.writes_to(changed[0][0])
