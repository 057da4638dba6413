"""The ranks of an MPI program, and how they agree."""

from __future__ import annotations

import importlib
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from .. import errors
from ..errors import ArgumentError, MultistageError
from ..model.costs import Costs
from ..states.layout import Array

if TYPE_CHECKING:
    from mpi4py.MPI import Op

T = TypeVar("T")


class Request(Protocol):
    """What is used of an `mpi4py.MPI.Request`."""

    def Test(self) -> bool: ...
    def Wait(self) -> object: ...


class Communicator(Protocol):
    """What is used of an `mpi4py.MPI.Comm`."""

    def Get_rank(self) -> int: ...
    def Get_size(self) -> int: ...
    def Dup(self) -> Communicator: ...
    def Free(self) -> None: ...
    def Abort(self, errorcode: int = ..., /) -> object: ...
    def Split_type(self, split_type: int, /) -> Communicator: ...
    def Allreduce(self, sendbuf: Array, recvbuf: Array, op: Op, /) -> None: ...
    def Iallreduce(self, sendbuf: Array, recvbuf: Array, op: Op, /) -> Request: ...
    def allgather(self, sendobj: T, /) -> list[T]: ...


class Ranks:
    """The ranks of a communicator, and how they agree.

    Parameters
    ----------
    comm : Communicator, optional
        Duplicated, so that nothing here mixes with what the operators send;
        `MPI.COMM_WORLD` by default.

    Attributes
    ----------
    rank, size : int
    shared : Exception or None
        The last error that was raised on every rank.
    apart : bool
        Whether the ranks have called different things, so that nothing can be
        agreed any more.

    Raises
    ------
    ArgumentError
        If mpi4py is not installed.

    Notes
    -----
    Every method but `everywhere` and `abort` is collective.  For one thread.
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        try:
            mpi: Any = importlib.import_module("mpi4py.MPI")
        except ImportError as error:
            raise ArgumentError(
                f"MPI needs mpi4py ({error}); pip install 'multistage-checkpointing[mpi]'"
            ) from error
        self._comm: Communicator | None = (mpi.COMM_WORLD if comm is None else comm).Dup()
        self._least, self._most, self._node = mpi.MIN, mpi.MAX, mpi.COMM_TYPE_SHARED
        self.rank, self.size = self._own.Get_rank(), self._own.Get_size()
        self.shared: BaseException | None = None
        self.apart = False
        # MPI writes into the buffers of a reduction whether or not anything waits for it.
        self._unfinished: list[tuple[Request, object]] = []
        weakref.finalize(self, _outlive, self._unfinished).atexit = False

    @property
    def _own(self) -> Communicator:
        if self._comm is None:
            raise ArgumentError("this was closed; make a new one")
        return self._comm

    def gather(self, work: Callable[[], T], call: str = "the same") -> list[T]:
        """Do local work on every rank; return all results, or raise on all what one raised.

        `work` returns something small that can be pickled; `call` is what the
        program has called.

        Raises
        ------
        MultistageError
            Of the class raised on the first rank that failed, with its number
            and its message; an ArgumentError if another rank has called
            something else.
        """
        mine: tuple[str, str] | None = None
        result: Any = None
        cause: MultistageError | None = None
        try:
            result = work()
        except MultistageError as error:
            cause, mine = error, (type(error).__name__, str(error))
        found: list[tuple[str, tuple[str, str] | None, T]]
        found = self._own.allgather((call, mine, result))
        for rank, (other, _, _) in enumerate(found):
            if other != found[0][0]:
                self.apart = True
                raise self.everywhere(
                    ArgumentError(
                        f"rank 0 calls {found[0][0]} and rank {rank} {other}; call the same "
                        "methods in the same order on every rank"
                    )
                )
        failed = [(rank, failure) for rank, (_, failure, _) in enumerate(found) if failure]
        if not failed:
            return [one for _, _, one in found]
        first, (kind, message) = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        error_type = getattr(errors, kind, MultistageError)
        raise self.everywhere(error_type(f"rank {first}{more}: {message}")) from cause

    def same(self, found: Sequence[dict[str, object]], remedy: str) -> None:
        """Raise ArgumentError on every rank if gathered facts differ, naming both values."""
        for rank, facts in enumerate(found):
            for name, value in facts.items():
                if value != found[0][name]:
                    raise self.everywhere(
                        ArgumentError(
                            f"ranks disagree on {name}: {found[0][name]!r} on rank 0, "
                            f"{value!r} on rank {rank}; {remedy}"
                        )
                    )

    def everywhere(self, error: MultistageError) -> MultistageError:
        """Note that every rank raises this error now; return it."""
        self.shared = error
        return error

    def least(self, value: int) -> int:
        """Return the smallest of all ranks' values."""
        found = np.zeros(1, np.int64)
        self._own.Allreduce(np.array([value], np.int64), found, self._least)
        return int(found[0])

    def most(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        return self.most_later(value)()

    def most_of(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values, one by one."""
        mine = np.array(values, np.float64)
        found = np.zeros_like(mine)
        self._own.Allreduce(mine, found, self._most)
        return [float(value) for value in found]

    def most_later(self, value: float) -> Callable[[], float]:
        """Start finding the largest of all ranks' values; return what waits for it."""
        self._unfinished[:] = [each for each in self._unfinished if not each[0].Test()]
        mine, found = np.array([value]), np.zeros(1)
        request = self._own.Iallreduce(mine, found, self._most)
        self._unfinished.append((request, (mine, found)))

        def wait() -> float:
            request.Wait()
            return float(found[0])

        return wait

    def on_node(self) -> int:
        """Return how many ranks share this rank's memory."""
        node = self._own.Split_type(self._node)
        size = int(node.Get_size())
        node.Free()
        return size

    def abort(self, error: BaseException) -> None:
        """End all ranks, this rank's error on standard error; nothing after `free`.

        The others may be inside the operators' own communication, where no
        message of ours reaches them: there is no gentler way.
        """
        if self._comm is None:
            return
        text = "".join(traceback.format_exception(error))
        name = traceback.format_exception_only(error)[0].strip()
        # Not by `logging`: the process ends here, whether or not it was set up.
        sys.stderr.write(
            f"{text}multistage: rank {self.rank} of {self.size} raised {name}; "
            "all ranks are aborted\n"
        )
        sys.stderr.flush()
        self._comm.Abort(1)

    def free(self) -> None:
        """Give the communicator back.  May be called twice."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.Free()


# Reductions that nothing waited for, of ranks that are gone: see `Ranks`.
_outliving: list[tuple[Request, object]] = []


def _outlive(unfinished: list[tuple[Request, object]]) -> None:
    _outliving.extend(each for each in unfinished if not each[0].Test())


def slowest(costs: Sequence[Costs], rank: int) -> Costs:
    """Return the costs every rank plans with: the largest times, the smallest tier.

    Bytes stay those of `costs[rank]`, since no schedule depends on them;
    except where tapes have a size of their own, in states: then the bytes of
    the rank where a tape takes the most slots.

    Examples
    --------
    >>> slowest([Costs(1.0, 5.0, state_bytes=10), Costs(2.0, 4.0, state_bytes=30)], rank=0)
    ... # doctest: +ELLIPSIS
    Costs(forward_step_s=2.0, reverse_step_s=5.0, tape_step_s=None, state_bytes=10, ...)
    """
    mine = costs[rank]
    sized = mine if not any(one.tape_bytes for one in costs) else max(costs, key=_tape_slots)
    tiers = []
    for k, tier in enumerate(mine.tiers):
        same = [one.tiers[k] for one in costs]
        capacities = [one.capacity_states for one in same if one.capacity_states is not None]
        tiers.append(
            replace(
                tier,
                write_s=max(one.write_s for one in same),
                read_s=max(one.read_s for one in same),
                write_overhead_s=max(one.write_overhead_s for one in same),
                read_overhead_s=max(one.read_overhead_s for one in same),
                capacity_states=min(capacities, default=None),
                queue_depth=max(one.queue_depth for one in same),
            )
        )
    return Costs(
        forward_step_s=max(one.forward_step_s for one in costs),
        reverse_step_s=max(one.reverse_step_s for one in costs),
        tape_step_s=None if mine.state_is_tape else max(one.taping_s for one in costs),
        state_bytes=sized.state_bytes,
        tape_bytes=sized.tape_bytes,
        tiers=tuple(tiers),
        action_s=max(one.action_s for one in costs),
    )


def _tape_slots(costs: Costs) -> float:
    return costs.tape_slots
