"""Ranks as threads: what is used of mpi4py, and an error where MPI would wait forever.

Collectives are matched by their number on a communicator, as MPI does; unlike
MPI this fails at once when two ranks call different ones, or when a rank
waits for one that has left.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

MPI = SimpleNamespace(MAX=np.maximum, COMM_TYPE_SHARED=1)


class Deadlock(AssertionError):
    """Real ranks would wait forever, or talk past each other."""


class Aborted(BaseException):
    """Another rank called Abort: a real process would be gone."""


class World:
    """Some ranks, and what they have sent."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.left: set[int] = set()
        self.aborted = False
        self.sent: dict[tuple[Any, ...], dict[int, tuple[str, Any]]] = {}
        self.dropped: list[Any] = []  # reductions whose buffers were given back in flight
        self.collectives = 0  # begun, of all communicators

    def post(self, where: tuple[Any, ...], rank: int, kind: str, value: Any) -> None:
        with self.changed:
            entries = self.sent.setdefault(where, {})
            if not entries:
                self.collectives += 1
            for other, (what, _) in entries.items():
                if what != kind:
                    raise Deadlock(f"rank {rank} calls {kind}, rank {other} called {what}")
            entries[rank] = kind, value
            self.changed.notify_all()

    def collect(self, where: tuple[Any, ...], rank: int) -> list[Any]:
        def ready() -> bool:
            entries = self.sent[where]
            return len(entries) == self.size or self.aborted or bool(self.left - entries.keys())

        with self.changed:
            if not self.changed.wait_for(ready, timeout=280):
                raise Deadlock(f"rank {rank} waits at {where}")
            if self.aborted:
                raise Aborted
            entries = self.sent[where]
            if len(entries) < self.size:
                raise Deadlock(f"rank {rank} waits for {self.left - entries.keys()}, who left")
            return [entries[other][1] for other in range(self.size)]


class Comm:
    """One rank's communicator."""

    def __init__(self, world: World, rank: int, name: tuple[Any, ...] = ()) -> None:
        self.world, self.rank, self.name = world, rank, name
        self.calls = self.copies = 0
        self.freed = False

    def _post(self, kind: str, value: Any) -> tuple[Any, ...]:
        assert not self.freed, "used after Free"
        where = (*self.name, self.calls)
        self.calls += 1
        self.world.post(where, self.rank, kind, value)
        return where

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.world.size

    def Dup(self) -> Comm:
        self.copies += 1
        copy = Comm(self.world, self.rank, (*self.name, f"copy {self.copies}"))
        self.world.collect(self._post("Dup", None), self.rank)
        return copy

    def Split_type(self, split_type: int) -> Comm:
        assert split_type == MPI.COMM_TYPE_SHARED
        return self.Dup()

    def Free(self) -> None:
        assert not self.freed, "freed twice"
        self.freed = True

    def Abort(self, errorcode: int = 0) -> None:
        with self.world.changed:
            self.world.aborted = True
            self.world.changed.notify_all()

    def allgather(self, value: Any) -> list[Any]:
        return self.world.collect(self._post("allgather", value), self.rank)

    def sendrecv(self, value: Any, dest: int, source: int) -> Any:
        return self.allgather((dest, value))[source][1]

    def Allreduce(self, send: Any, receive: Any, op: Callable[..., Any]) -> None:
        receive[...] = op.reduce(  # type: ignore[attr-defined]
            self.world.collect(self._post("Allreduce", send.copy()), self.rank)
        )

    def Iallreduce(self, send: Any, receive: Any, op: Callable[..., Any]) -> Any:
        return Request(self, self._post("Iallreduce", send.copy()), receive, op)


class Request:
    """A reduction in flight; its buffers belong to MPI until it is complete."""

    def __init__(
        self, comm: Comm, where: tuple[Any, ...], receive: Any, op: Callable[..., Any]
    ) -> None:
        self.comm, self.where, self.receive, self.op = comm, where, receive, op
        self.dropped = weakref.finalize(self, comm.world.dropped.append, where)

    def Wait(self) -> None:
        self._complete(self.comm.world.collect(self.where, self.comm.rank))

    def Test(self) -> bool:
        world = self.comm.world
        with world.changed:
            sent = world.sent[self.where]
        if complete := len(sent) == world.size:
            self._complete([value for _, value in sent.values()])
        return complete

    def _complete(self, sent: list[Any]) -> None:
        self.receive[...] = self.op.reduce(sent)  # type: ignore[attr-defined]
        self.dropped.detach()


def run_ranks(size: int, work: Callable[[Comm], Any], world: World | None = None) -> list[Any]:
    """Run `work(comm)` on every rank; return the results, or what each raised."""
    world = World(size) if world is None else world
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = work(Comm(world, rank))
        except BaseException as error:
            results[rank] = error
        finally:
            with world.changed:
                world.left.add(rank)
                world.changed.notify_all()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def succeed(results: list[Any]) -> list[Any]:
    """Return the results; raise what a rank raised, the first error that is no consequence."""
    raised = [one for one in results if isinstance(one, BaseException)]
    raised.sort(key=lambda one: isinstance(one, Deadlock | Aborted))
    if raised:
        raise raised[0]
    return results
