"""The ranks of an MPI program, and how they agree: on what they do once, and on transfers.

An `AgreedStore` is a store of each rank's own whose answers all ranks share.  A
domain-decomposed operator communicates, so every rank must run the same
actions in the same order.  A schedule decides from the answers to its
transfers; so the answers must be the same everywhere:

put, blocking        always yes; a rank without room remembers that it holds
                     nothing
put, opportunistic   yes at least `spacing` steps after the last yes, where
                     `spacing` was agreed a block of writes ahead
wait_written         always yes, once this rank is done with the arrays
get                  agreed in one small reduction: lost on one rank is lost
                     on all

So a lost write shows when it is read, on every rank at once.  Nothing else is
agreed while steps run: one reduction per state read, and one that no rank
waits for per block of writes, none per step.

Why nothing waits forever: all reductions are made on a communicator of our
own, at places that every rank passes in the same order, since the schedule is
the same and has had the same answers.  Take the rank that is furthest behind:
what it waits for was started by the others earlier in that order, or needs
only their threads that never communicate.  So it moves on.  Where an error
takes one rank out of that order, nothing here communicates any more: `drop`,
`wait_written` and `close` are local.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from zlib import crc32

import numpy as np

from .. import errors
from ..backends.base import CheckpointLost, Store
from ..backends.wrapper import WrapperStore
from ..errors import ArgumentError, MultistageError
from ..execute.executor import Resumed
from ..model.costs import Costs
from ..model.stages import Stage, StageCosts
from ..model.tier import Tier
from ..planners import Plan
from ..planners.chain import pieces
from ..reversing.arguments import Made, Unequals
from ..states.layout import Array, Layout

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

T = TypeVar("T")


Communicator: TypeAlias = "Comm"


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
        self._most, self._node = mpi.MAX, mpi.COMM_TYPE_SHARED
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
            kind = next(
                each.__name__ for each in type(error).__mro__ if hasattr(errors, each.__name__)
            )
            cause, mine = error, (kind, str(error))
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

    def agreed(self, work: Callable[[], T], call: str = "the same") -> T:
        """Do local work on every rank; return this rank's result, which stays here, or raise.

        As `gather` does, which says what is raised.
        """
        found: list[T] = []
        self.gather(lambda: found.append(work()), call)
        return found[0]

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

    def most(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        return self.most_of([value])[0]

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


def shared_ranks(comm: Communicator) -> Ranks | None:
    """Return the ranks of a communicator, one duplicate of it for all who ask; None for one rank.

    Freeing one is collective, and what runs sweeps is dropped when the interpreter collects
    it, at other moments on every rank.  It is kept with the communicator, whose handle may
    be another's once it is freed.
    """
    if comm.Get_size() == 1:
        return None
    found = comm.Get_attr(_key())
    if found is None:
        found = Ranks(comm)
        comm.Set_attr(_key(), found)
    assert isinstance(found, Ranks)
    return found


@cache
def _key() -> int:
    mpi: Any = sys.modules["mpi4py.MPI"]
    return int(mpi.Comm.Create_keyval())


def world_size() -> int:
    """Return how many ranks MPI has started; 1 if nothing has used MPI yet."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return int(mpi.COMM_WORLD.Get_size()) if mpi is not None and mpi.Is_initialized() else 1


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
    sized = mine
    if any(one.tape_bytes for one in costs):
        sized = max(costs, key=lambda one: one.tape_slots)
    scales = [1.0] * len(costs)
    return Costs(
        forward_step_s=max(one.forward_step_s for one in costs),
        reverse_step_s=max(one.reverse_step_s for one in costs),
        tape_step_s=None if mine.state_is_tape else max(one.taping_s for one in costs),
        state_bytes=sized.state_bytes,
        tape_bytes=sized.tape_bytes,
        tiers=tuple(
            _slowest_tier(tier, [one.tiers[k] for one in costs], scales)
            for k, tier in enumerate(mine.tiers)
        ),
        action_s=max(one.action_s for one in costs),
    )


def tightest(found: Sequence[Unequals], rooms: Sequence[int]) -> Unequals:
    """Return costs of unequal steps and a tier for all ranks, with the memory of rank 0.

    The largest times, and sizes as parts of the memory of the rank where they are the largest
    parts, in bytes of rank 0; but the least bytes that are spared.  All ranks have as many
    stages, and a tier or none.

    Parameters
    ----------
    rooms : sequence of int
        Bytes of each rank's memory, of which sizes are parts.

    Examples
    --------
    >>> from multistage.model.stages import Stage
    >>> ranks = [(StageCosts((Stage("a", 1.0, 2.0, n, n),), n), room, None)
    ...          for n, room in ((10, 100), (90, 300))]
    >>> costs, room, _ = tightest(ranks, [100, 300])
    >>> costs.stages[0].output_bytes, room
    (30, 100)
    """
    # In no memory states of no bytes are kept, as in a byte.
    rooms = [max(1, own) for own in rooms]
    room, tier = rooms[0], found[0][2]

    def size(values: Iterable[int]) -> int:
        return max(-(-value * room // own) for value, own in zip(values, rooms, strict=True))

    def spared(values: Iterable[int]) -> int:
        return min(value * room // own for value, own in zip(values, rooms, strict=True))

    def stage(same: tuple[Stage, ...]) -> Stage:
        agreed: dict[str, Any] = {
            field.name: (size if field.name.endswith("_bytes") else max)(
                getattr(one, field.name) for one in same
            )
            for field in fields(Stage)
            if field.name.endswith(("_bytes", "_s"))
        }
        agreed["spared_bytes"] = spared(one.spared_bytes for one in same)
        return Stage(name=same[0].name, **agreed)

    costs = [one.whole for one, _, _ in found]
    agreed = StageCosts(
        tuple(map(stage, zip(*(one.stages for one in costs), strict=True))),
        size(one.input_bytes for one in costs),
        size(one.input_gradient_bytes for one in costs),
    )
    tiers = [own for _, _, own in found if own is not None]
    scales = [room / own for own in rooms]
    return agreed, room, None if tier is None else _slowest_tier(tier, tiers, scales)


def _slowest_tier(mine: Tier, same: Sequence[Tier], scales: Sequence[float]) -> Tier:
    """Return a tier with the longest times of all ranks' and, scaled, the least rates and room."""

    def scaled(name: str) -> Iterator[float]:
        found = zip((getattr(one, name) for one in same), scales, strict=True)
        return (value * scale for value, scale in found if value is not None)

    agreed: dict[str, Any] = {}
    for name in (field.name for field in fields(Tier)):
        if name.endswith("_bytes_per_s"):
            agreed[name] = min(scaled(name))
        elif name.startswith("capacity_"):
            agreed[name] = min(map(int, scaled(name)), default=None)
        elif name.endswith("_s") or name == "queue_depth":
            agreed[name] = max(getattr(one, name) for one in same)
    return replace(mine, **agreed)


_FROM_STATE_0 = Resumed(())


class Agreed:
    """What all ranks plan with; see `reversing.arguments.Agreement`."""

    def __init__(self, ranks: Ranks, *, tiered: bool) -> None:
        self._ranks, self._tiered = ranks, tiered
        self.most, self.size = ranks.most, ranks.size

    def slowest(self, mine: Callable[[], Costs]) -> Costs:
        """Return the costs that all ranks plan with, after those that each has seen."""
        found = self._ranks.gather(mine if self._tiered else lambda: mine().without_tiers())
        facts: list[dict[str, object]] = [
            {"the tiers in costs": len(costs.tiers), "tape_step_s in costs": costs.state_is_tape}
            for costs in found
        ]
        self._ranks.same(facts, "give every rank costs of the same kind")
        return slowest(found, self._ranks.rank)

    def fitting(
        self,
        mine: Callable[[], tuple[Unequals, int]],
        make: Callable[[Unequals, int | None], Made],
        start: Resumed = _FROM_STATE_0,
    ) -> Made:
        """Return what is made of unequal steps and fits every rank.

        Sizes are parts of what ranks have for what they keep.  What one has no room for, since
        its largest step is less of its memory than of another's, is planned with sizes as parts
        of all of their limits, then with less; Revolve with few states, or with none, is tried
        last, which always fits.
        """

        def known() -> tuple[Unequals, int, int]:
            own, left = mine()
            return own, left, left + pieces.least_in_pieces(own[0])

        every = self._ranks.gather(known)
        (own, _, _), _, limit = every[self._ranks.rank]
        found, limits = [one for one, _, _ in every], [most for _, _, most in every]
        costs, room, tier = tightest(found, [room for _, room, _ in found])
        room = min(left * room // max(1, its) for (_, its, _), left, _ in every)
        whole, memory, rates = tightest(found, limits)
        beside = memory - pieces.least_in_pieces(whole)
        tried: list[tuple[Unequals, int | None]] = [((costs, room, tier), None)]
        tried += [((whole, beside, rates), None)] if beside >= 0 else []
        tried += [((costs, k * room // 4, tier), None) for k in (2, 0)]
        tried += [((costs, 0, tier), slots) for slots in (4, 2, 1, 0)]
        for given, slots in tried:
            made = self.same(partial(make, given, slots))
            actions = made.actions if isinstance(made, Plan) else made
            if self.most(start.peak_bytes(actions, own) - limit) <= 0:
                break
        return made

    def largest(self, mine: Callable[[], int]) -> int:
        """Return the largest of what `mine` returns on each rank; what it raises, all raise."""
        return max(self._ranks.gather(mine))

    def same(self, make: Callable[[], Made]) -> Made:
        """Return what `make` returns; raise on all ranks unless it is the same.

        Equal costs make equal plans, unless the ranks' arithmetic differs.
        """
        made: list[Made] = []

        def facts() -> dict[str, object]:
            made.append(found := make())
            if not isinstance(found, Plan):
                return {"the schedule": f"{crc32(repr(found).encode()):x}"}
            told = (found.planner, found.forward_steps, found.makespan_s, found.parameters)
            return {"the plan": f"{told} {crc32(repr(found.actions).encode()):x}"}

        remedy = "run the same version of everything on every rank"
        self._ranks.same(self._ranks.gather(facts), remedy)
        return made[0]


# Opportunistic writes between two agreements.  Few, so that a tier that became
# slower is noticed soon; more than a usual queue, so that it can be noticed.
_BLOCK = 4
# What is left of the weight of a block when the next one is over: stores that
# coalesce small states are full only once in several blocks.
_MEMORY = 0.75
# If no rank waited for room, the next block may be this much denser.
_DENSER = 0.9


class AgreedStore(WrapperStore):
    """A store of each rank's own whose answers are the same on every rank.

    Parameters
    ----------
    inner : Store
        This rank's store, closed; on a disk of its own node, for example.
    ranks : Ranks
    clock : callable
        Seconds.

    Attributes
    ----------
    stalled_s : float
        Seconds `put` has waited for room since `open`.

    Notes
    -----
    Meets the contract of `Store` but for one thing: `put` with `block` and
    `wait_written` never say no.  A `put` that does not block may wait too,
    when it was agreed to take the state and this rank has no room yet: then
    the next blocks are agreed to be sparser.  `open` and `get` are collective.

    The rule of the spacing: a rank that took one state every g steps and
    waited for a share f of the time asks for one every g / (1 - f), which it
    could have taken without waiting; a rank that never waited asks for a
    little less than there is; one whose tier is full asks for no more at all.
    The largest wish holds for all, from the block after the next on.
    """

    def __init__(
        self, inner: Store, ranks: Ranks, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(inner)
        self._ranks = ranks
        self._clock = clock
        self._pending: Callable[[], float] | None = None
        self._reset()

    def _reset(self) -> None:
        self.stalled_s = 0.0
        self._missing: set[int] = set()  # taken, but not held by this rank
        self._begin(0)

    def _begin(self, key: int) -> None:
        """Start a forward sweep: whatever the schedule offers is taken until agreed otherwise."""
        self._last, self._next, self._spacing = -1, float(key), 1.0
        self._full = False
        self._steps = self._writes = self._elapsed_s = self._waited_s = 0.0
        self._start_block(key)

    def _start_block(self, key: int) -> None:
        self._block_key, self._block_s = key, self._clock()
        self._block_writes, self._block_waited_s = 0, 0.0

    def check(self) -> None:
        """Do nothing: a rank that raised alone would leave the others waiting; see `open`."""

    def open(self, layout: Layout) -> None:
        """Open every rank's store, or none.

        Raises
        ------
        StoreError
            On every rank, if it cannot be opened on one, with the message of that one.
        """
        self._pending = None
        ours = False

        def opened() -> None:
            nonlocal ours
            self._inner.open(layout)
            ours = True

        try:
            self._ranks.gather(opened)
        except MultistageError:
            if ours:  # else it may be open for others
                self._inner.close()
            raise
        self._reset()

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Take a state if that was agreed; see `Store.put`."""
        if not block:
            if key <= self._last:  # offers ascend within a sweep: this is the next one
                self.settle()
                self._begin(key)
            self._last = key
            if self._block_writes == _BLOCK:
                self._agree(key)
            if key < self._next:
                self.stats.refused += 1
                return False
            self._next = max(self._next + self._spacing, key + self._spacing - 1)
            self._block_writes += 1
        if not self._inner.put(key, arrays):
            before = self._clock()
            if not self._inner.put(key, arrays, block=True):
                self._missing.add(key)
                self._full = True
            waited = self._clock() - before
            self.stalled_s += waited
            self._block_waited_s += waited
        return True

    def _agree(self, key: int) -> None:
        """End a block: take over what was agreed since the last one, and ask for the next."""
        wish = self._wish(key)
        self.settle()
        self._pending = self._ranks.most_later(wish)
        self._start_block(key)

    def _wish(self, key: int) -> float:
        """Return the spacing this rank asks for; see the class."""
        elapsed_s = self._clock() - self._block_s
        self._steps = _MEMORY * self._steps + key - self._block_key
        self._writes = _MEMORY * self._writes + self._block_writes
        self._elapsed_s = _MEMORY * self._elapsed_s + elapsed_s
        self._waited_s = _MEMORY * self._waited_s + self._block_waited_s
        if self._full:
            return float("inf")
        if not self._block_waited_s:
            return max(1.0, _DENSER * self._spacing)
        computed_s = max(self._elapsed_s - self._waited_s, 1e-3 * self._elapsed_s)
        return max(1.0, self._steps / self._writes * self._elapsed_s / computed_s)

    def settle(self) -> None:
        """Take over the spacing asked for last, if any was.  Collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._spacing = pending()

    def wait_written(self, key: int) -> bool:
        """Block until this rank is done with the arrays of `key`; True, see the class."""
        if key not in self._missing and not self._inner.wait_written(key):
            self._missing.add(key)
        return True

    def ended(self, key: int, timeout_s: float) -> bool:
        """Answer True: `wait_written` waits.  A clock of one rank must not decide for all."""
        return True

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Answer True: `get` waits, for the same reason."""
        return True

    def cancel(self, key: int) -> None:
        """Do nothing: ranks agree on what is written, and one alone gives up none of it."""

    def waits(self) -> bool:
        """Answer False: `put` waits if it must."""
        return False

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue this rank's read of `key`."""
        if key not in self._missing:
            self._inner.prefetch(key)

    def get(self, key: int) -> list[Array]:
        """Return this rank's arrays, when every rank has its own.  Collective.

        Raises
        ------
        CheckpointLost
            On every rank, if one has lost it.
        """
        arrays: list[Array] | None = None
        reason = "its write failed or found no room"
        if key not in self._missing:
            try:
                arrays = self._inner.get(key)
            except CheckpointLost as error:
                reason = str(error)
        ranks = self._ranks
        lost = ranks.most(-1 if arrays is not None else ranks.rank)
        if arrays is not None and lost < 0:
            return arrays
        if arrays is not None:
            self.stats.lost += 1
            reason = f"rank {lost:.0f} has lost it"
        self.drop(key)
        raise CheckpointLost(reason)

    def drop(self, key: int) -> None:
        """Free this rank's copy of `key`."""
        self._missing.discard(key)
        self._inner.drop(key)

    def close(self) -> None:
        """Close this rank's store, whatever the others do.  May be called twice."""
        # Not waited for: after an error the others may never get there.
        self._pending = None
        self._inner.close()
