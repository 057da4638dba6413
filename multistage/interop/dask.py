"""Many shots over a Dask cluster: independent adjoints, their results summed.

A *shot* is one computation and its adjoint, a `Reversal` most often.  Each runs
on a worker, within a budget of its own and with a scratch folder of that worker
as its slow tier.  A worker keeps the `Reversal` of a shot for the next one, with
its costs, plan, buffers and file.  Results come to the client one by one and are added in the
order of the shots, whatever the order of their arrival: the sum is that of a
plain loop to the last bit.  Only so many shots are sent out ahead of the sum that
the client never holds more than a few results.

What a fault does:

==============================  ==============================================
a worker dies                   Dask runs its shots elsewhere, or on the
                                worker's successor; after more deaths of one
                                shot than its cluster allows, so do we
a shot kills worker by worker   `ShotError` after `deaths` times
a shot raises                   `ShotError` with its index, the cause attached;
                                its `Reversal` is not kept
no folder for scratch           `StoreError` naming the workers, before any
                                shot runs; `ShotError` on one that joins later
all workers are gone            a `MultistageError` after `patience_s`
Ctrl-C, any error               shots not begun are cancelled
==============================  ==============================================

A worker that is killed leaves no file of checkpoints: it never had a name.
What a worker keeps is closed when `map_shots` returns or raises.
"""

from __future__ import annotations

import importlib
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast
from urllib.parse import quote
from uuid import uuid4

import optree

from ..backends.files import FileStore
from ..errors import ArgumentError, MultistageError, ShotError, StoreError
from ..model.budget import Budget
from ..model.chain import Chain
from ..reversal import Reversal
from ..reversing.arguments import chain_of, kind_of
from ..reversing.sweeps import Sweeps
from ..support.free_memory import DEFAULT_SHARE, default_budget_bytes
from ..support.units import format_bytes

if TYPE_CHECKING:
    from distributed import Client  # type: ignore[import-not-found, unused-ignore]

Item = TypeVar("Item")
Result = TypeVar("Result")
State = TypeVar("State")
Adjoint = TypeVar("Adjoint")
Memory = int | str

_log = logging.getLogger(__name__)
# How often to look whether any worker is left while no shot ends.
_POLL_S = 5.0
# "lost": the worker that held the result died; Dask computes it again.
_UNDER_WAY = ("pending", "lost")


def _distributed() -> Any:
    try:
        return importlib.import_module("distributed")
    except ImportError as error:
        raise ArgumentError(
            "map_shots needs distributed; pip install 'multistage-checkpointing[dask]'"
        ) from error


def map_shots(
    client: Client,
    shot: Callable[[Item, ShotWorker], Result],
    shots: Iterable[Item],
    *,
    memory: Memory | None = None,
    scratch: str | Path | None = None,
    reduce: Callable[[Result, Result], Result] | None = None,
    arrived: Callable[[int, Result], object] | None = None,
    ahead: int | None = None,
    deaths: int = 3,
    patience_s: float = 300.0,
) -> Result:
    """Run every shot on a cluster; return their results summed in the order of the shots.

    Parameters
    ----------
    client : distributed.Client
        Of a running cluster, not an asynchronous one; its workers have this
        package.
    shot : callable
        `shot(item, worker) -> result`, run on a worker, of which it is given a `ShotWorker`:
        `worker.reversal(...)` is its `Reversal`.  It may run more than once for an item, so it
        should have no effect but its result.
    shots : iterable
        The items; taken one by one as workers become free.
    memory : int or str, optional
        Fast memory for checkpoints of one running shot: bytes, `"512 MiB"` or
        `"32 slots"`.  A worker of several threads runs as many shots at once.
        Default: a quarter of the worker's memory limit, shared by its threads.
    scratch : path, optional
        A folder that exists on every worker; a relative one is looked for in
        the worker's own folder.  Default: the worker's own (`local_directory`).
    reduce : callable, optional
        `reduce(total, result) -> total`; called on the client in the order of
        the shots.  Default: adds numbers and arrays leaf by leaf.
    arrived : callable, optional
        `arrived(index, result)`, called on the client as results arrive.
    ahead : int, optional
        Most results in flight or waiting for their turn; by default twice the
        cluster's threads, which is also what the client holds at worst.
    deaths : int
        How often a shot is begun again after Dask has given it up because
        workers died under it.
    patience_s : float
        Seconds to wait for a worker while there is none.

    Returns
    -------
    The reduced result: that of the only shot if there is one.

    Raises
    ------
    ArgumentError
        If there is no shot, or the budget is beyond a worker's memory limit.
    StoreError
        If a worker cannot write to its scratch folder; names it.
    ShotError
        If a shot raises, or kills the workers it runs on.
    MultistageError
        If no worker is there for `patience_s`.

    Notes
    -----
    Blocks until all is done.  Shots that run while an error ends it run on to
    their end, since a thread cannot be stopped; their scratch goes with them.

    Examples
    --------
    >>> def shot(column, worker):
    ...     model = build(200, 300, n_steps=1000, source_column=column)
    ...     with worker.reversal(model.chain(), n_steps=1000) as run:
    ...         run.forward(model.start())
    ...         adjoint = run.reverse(model.start_adjoint())
    ...     return model.misfit(), model.gradient(adjoint)
    >>> misfit, gradient = map_shots(client, shot, range(40, 260, 20))  # doctest: +SKIP
    """
    _distributed()
    cluster: Any = client
    if cluster.asynchronous:
        raise ArgumentError("map_shots blocks; give it a client that was not made asynchronous")
    for name, value, least in (("ahead", ahead, 1), ("deaths", deaths, 0)):
        if value is not None and value < least:
            raise ArgumentError(f"{name}={value} must be at least {least}")
    if memory is not None:
        Budget.parse(memory)
    folder = None if scratch is None else str(scratch)
    _await_workers(cluster, patience_s)
    _require_workers(cluster, memory, folder)
    sender = _Sender(cluster, shot, memory, folder, deaths, patience_s)
    add = _add if reduce is None else reduce
    source = enumerate(shots)
    waiting: dict[int, Result] = {}
    total: Any = None
    summed, exhausted = 0, False
    try:
        cluster.register_plugin(_plugin(memory, folder), sender.name)
        while True:
            room = ahead or 2 * max(1, sum(cluster.nthreads().values()))
            while not exhausted and len(sender.pending) + len(waiting) < room:
                try:
                    index, item = next(source)
                except StopIteration:
                    exhausted = True
                else:
                    sender.send(_Job(index, item))
            if not sender.pending:
                break
            for index, result in sender.receive():
                if arrived is not None:
                    arrived(index, result)
                waiting[index] = result
            while summed in waiting:
                result = waiting.pop(summed)
                total = result if not summed else add(total, result)
                summed += 1
    finally:
        with suppress(Exception):  # whatever ended the loop is what to tell
            sender.cancel()
    if not summed:
        raise ArgumentError("there are no shots; give at least one")
    return total  # type: ignore[no-any-return]


@dataclass(slots=True)
class _Job:
    index: int
    item: Any
    deaths: int = 0


class _Sender:
    """Shots in flight on the cluster."""

    def __init__(
        self,
        cluster: Any,
        shot: Callable[..., Any],
        memory: Memory | None,
        scratch: str | None,
        deaths: int,
        patience_s: float,
    ) -> None:
        self._dask = _distributed()
        self._cluster = cluster
        self.name = f"multistage-shots-{uuid4().hex}"  # of what the workers keep
        self._arguments = shot, self.name, memory, scratch
        self._deaths = deaths
        self._patience_s = patience_s
        self.pending: dict[Any, _Job] = {}

    def send(self, job: _Job) -> None:
        # Impure: two equal items are two shots.  Lower indices first, since
        # the sum waits for them.
        future = self._cluster.submit(
            _run, *self._arguments, job.item, pure=False, priority=-job.index
        )
        self.pending[future] = job

    def receive(self) -> Iterator[tuple[int, Any]]:
        """Wait until some shots have ended; yield their indices and results."""
        ended = self._ended()
        while not ended:
            _await_workers(self._cluster, self._patience_s)
            ended = self._ended()
        for future in ended:
            job = self.pending[future]
            status = future.status
            if status in _UNDER_WAY:
                continue  # its result went with a worker since it was looked at
            if status == "finished":
                try:
                    result = future.result(timeout=_POLL_S)
                except (TimeoutError, self._dask.CancelledError):
                    continue  # its worker died just now: it runs again
                except Exception as error:
                    raise ShotError(job.index, f"its result was lost: {error!r}") from error
                del self.pending[future]
                yield job.index, result
                continue
            del self.pending[future]
            if status != "error":
                raise ShotError(job.index, f"the cluster has {status} it")
            cause = future.exception()
            if not isinstance(cause, self._dask.KilledWorker):
                raise ShotError(job.index, f"it raised {cause!r}") from cause
            job.deaths += 1
            if job.deaths > self._deaths:
                raise ShotError(
                    job.index,
                    "the workers it ran on died; is their memory limit above memory= and what "
                    "the computation takes beside it?",
                ) from cause
            _log.warning("shot %d begins again: %s", job.index, cause)
            self.send(job)

    def _ended(self) -> list[Any]:
        with suppress(TimeoutError, self._dask.CancelledError):  # each is looked at by itself
            self._dask.wait(list(self.pending), timeout=_POLL_S, return_when="FIRST_COMPLETED")
        return [future for future in self.pending if future.status not in _UNDER_WAY]

    def cancel(self) -> None:
        """Cancel shots not begun; close what the workers keep."""
        try:
            if self.pending:
                self._cluster.cancel(list(self.pending))
                self.pending.clear()
        finally:
            self._cluster.unregister_worker_plugin(self.name)


def _add(total: Any, result: Any) -> Any:
    return optree.tree_map(operator.add, total, result)


def _await_workers(cluster: Any, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while not cluster.nthreads():
        left = until - time.monotonic()
        if left <= 0:
            raise MultistageError(
                f"the cluster has had no worker for {patience_s:g} s; start some, or see why they "
                "died in their logs"
            )
        time.sleep(min(0.1, left))


def _require_workers(cluster: Any, memory: Memory | None, scratch: str | None) -> None:
    """Raise if a worker cannot take shots, before any runs."""
    # A worker that dies just now answers with an error of its connection: its
    # successor looks for itself before its first shot.
    answers = cluster.run(_unusable, memory, scratch, on_error="ignore")
    wrong = {worker: reason for worker, reason in answers.items() if reason is not None}
    if wrong:
        raise _errors(wrong)


def _errors(wrong: dict[str, tuple[bool, str]]) -> MultistageError:
    lines = [f"worker {worker}: {reason}" for worker, (_, reason) in sorted(wrong.items())]
    text = "; ".join(lines)
    is_argument = any(is_argument for is_argument, _ in wrong.values())
    return ArgumentError(text) if is_argument else StoreError(text)


# ------------------------------------------------------------------ on a worker


class ShotWorker:
    """The worker that a shot runs on: its budget, its tier, and a `Reversal` for shot after shot.

    `map_shots` makes one on each worker; shots that run at once in threads share it.

    Parameters
    ----------
    memory, tiers
        Those of one running shot, as `Reversal` takes them.

    Examples
    --------
    >>> import numpy as np
    >>> from multistage import FunctionChain
    >>> worker, gradients = ShotWorker("2 slots", "memory:"), []
    >>> for scale in (1, 2, 3):
    ...     chain = FunctionChain(lambda x, i: scale * x, lambda x, a, i: scale * a)
    ...     with worker.reversal(chain, n_steps=4) as run:
    ...         last = run.forward(np.array(1.0))
    ...         gradients.append(float(run.reverse(np.array(1.0))))
    >>> gradients
    [1.0, 16.0, 81.0]
    >>> worker.close()
    """

    def __init__(self, memory: Memory, tiers: str) -> None:
        self.memory, self.tiers = memory, tiers
        self._idle: list[tuple[object, Sweeps[Any, Any]]] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def reversal(
        self,
        chain: Chain[State, Adjoint] | Callable[[State, int], State],
        adjoint_step: Callable[..., Adjoint] | None = None,
        n_steps: int | None = None,
        *,
        tape_step: Callable[[State, int], tuple[State, object]] | None = None,
        planner: str = "auto",
        checked: bool = False,
    ) -> Iterator[Reversal[State, Adjoint]]:
        """Lend a `Reversal` with these operators, for a `with` block.

        It goes on with costs, plan, buffers and file of an earlier shot with as many steps and
        operators of the same kind, which no shot is using, as by `Reversal.use`; else it is a
        new one, in which the first sweep measures.  It is for the block alone.

        Parameters
        ----------
        chain, adjoint_step, n_steps, tape_step, planner, checked
            As for `Reversal`.  Make a `Reversal` with `memory` and `tiers` where other
            arguments are needed.

        Notes
        -----
        One that is kept holds its buffers and its file.  Those of other kinds keep costs and
        plans alone while shots of this kind run.  After an exception in the block none is kept.
        """
        operators = chain_of(chain, adjoint_step, tape_step)
        kind = n_steps, planner, checked, kind_of(operators)
        run: Reversal[State, Adjoint] = Reversal(
            operators,
            n_steps=n_steps,
            memory=self.memory,
            tiers=self.tiers,
            planner=planner,
            checked=checked,
        )
        if kept := self._taken(kind):
            run._sweeps = kept
            run.use(operators)
        sweeps = run._sweeps
        with ExitStack() as on_error:
            on_error.callback(sweeps.end, keep=False)
            yield run
            run._sweeps = cast(Any, _Returned())
            sweeps.use(None)  # which refer to the model of this shot
            with self._lock:
                if not self._closed:
                    self._idle.append((kind, sweeps))
                    on_error.pop_all()

    def _taken(self, kind: object) -> Sweeps[Any, Any] | None:
        """Return kept sweeps of a kind, if there are some; close the others' tiers."""
        with self._lock:
            found = next((each for each in self._idle if each[0] == kind), None)
            if found is not None:
                self._idle.remove(found)
            for other, sweeps in self._idle:
                if other != kind:
                    sweeps.end(keep=False)
        return None if found is None else found[1]

    def close(self) -> None:
        """Close what is kept, and what running shots give back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, sweeps in idle:
            sweeps.end(keep=False)


class _Returned:
    """In the place of the sweeps of a `Reversal` that was lent."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ArgumentError(
            "a Reversal of worker.reversal() is for its with block alone, and another shot may "
            "have its place by now; ask for one in a block of its own"
        )


def _plugin(memory: Memory | None, scratch: str | None) -> Any:
    """Return what makes a `ShotWorker` on each worker, and closes it in the end."""

    class Shots(_distributed().WorkerPlugin):  # type: ignore[misc]
        def setup(self, worker: Any) -> None:
            budget = _budget(worker) if memory is None else memory
            self.worker = ShotWorker(budget, f"file:{quote(str(_folder(worker, scratch)))}")

        def teardown(self, worker: Any) -> None:
            self.worker.close()

    return Shots()


def _run(
    shot: Callable[..., Any], name: str, memory: Memory | None, scratch: str | None, item: Any
) -> Any:
    worker = _distributed().get_worker()
    # It may have joined since the others were asked.
    reason = _unusable(memory, scratch, worker)
    if reason is not None:
        raise _errors({worker.address: reason})
    return shot(item, worker.plugins[name].worker)


def _folder(worker: Any, scratch: str | None) -> Path:
    own = Path(worker.local_directory).resolve()
    return own if scratch is None else own / scratch


def _limit(worker: Any) -> int | None:
    """Return the bytes above which the worker is killed, None if it has no limit."""
    limit: int | None = worker.memory_manager.memory_limit
    return limit or None


def _budget(worker: Any) -> int:
    limit = _limit(worker)
    whole = default_budget_bytes() if limit is None else int(DEFAULT_SHARE * limit)
    threads: int = worker.state.nthreads
    return whole // max(1, threads)


def _unusable(
    memory: Memory | None, scratch: str | None, dask_worker: Any
) -> tuple[bool, str] | None:
    """Return why this worker cannot take shots, if so, and whether an argument is to blame."""
    budget, limit = Budget.parse(memory or 0), _limit(dask_worker)
    threads = max(1, dask_worker.state.nthreads)
    if budget.bytes and limit is not None and budget.bytes * threads > limit:
        return True, (
            f"memory={format_bytes(budget.bytes)} for each of {threads} thread(s) is beyond its "
            f"memory limit of {format_bytes(limit)}; give less, or workers more"
        )
    try:
        FileStore(_folder(dask_worker, scratch)).check()
    except StoreError as error:
        return False, str(error)
    return None
