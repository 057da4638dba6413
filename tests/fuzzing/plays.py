"""The plays: what is done with a case's operators, and what must come of it.

The last state and the gradient have the bits of store-all, or a documented
error is raised, or the very exception that an operator raised; nothing is left.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import random
import signal
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import multistage
from multistage import Reversal
from multistage.backends import open_store
from multistage.errors import MultistageError, StateError

from . import planned
from .cases import Case, draw
from .contents import fingerprint
from .dropin import dropin
from .operators import Operators
from .oracle import store_all
from .trees import leaves
from .watch import Watch

PACKAGE = str(Path(multistage.__file__).parent)


class Raised(Exception):
    """What an operator raises."""


@dataclass
class Seen:
    """What came of a case: counts of outcomes, and what must not be."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def found(self, what: str, case: Case | None = None) -> None:
        """Note what must not be; `case` is another one than that which is told anyway."""
        self.findings.append(what if case is None else f"{what}, in {case}")


class Fault:
    """Raises something in the call of a number, counted from now; None: in none."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.left = -1
        self.raised: BaseException | None = None

    def __call__(self, kind: str, i: int) -> None:
        self.left -= 1
        if self.left != 0:
            return
        match self.kind:
            case "error":
                self.raised = Raised(f"in {kind} {i}")
            case "StopIteration":
                self.raised = StopIteration(f"in {kind} {i}")
            case "MemoryError":
                self.raised = MemoryError(f"in {kind} {i}")
            case "exit":
                self.raised = SystemExit(f"in {kind} {i}")
            case _:
                self.raised = KeyboardInterrupt()
                signal.raise_signal(signal.SIGINT)
                return
        raise self.raised


class Play:
    """One case at work."""

    def __init__(self, case: Case, folder: Path, watch: Watch, seen: Seen) -> None:
        self.case, self.folder, self.watch, self.seen = case, folder, watch, seen
        self.answer = store_all(case)
        self.fault = Fault(case.fault)
        self.operators = Operators(case, self.fault)
        self._states: Any = None
        self._beside: Case | None = None  # the case itself, where it runs beside another

    # ----------------------------------------------------------------- the calls

    def reversal(self, **changes: Any) -> Reversal[Any, Any]:
        """Return the case's Reversal."""
        case, operators = self.case, self.operators
        n = None if case.until else operators.n_steps
        options: dict[str, Any] = {
            "memory": planned.budget(case),
            "tiers": planned.tiers(case, self.folder),
            "planner": planned.planner(case, operators.n_steps),
            "costs": planned.costs(case),
            "checked": case.checked,
            "progress": False,
        }
        options |= changes
        if case.front == "plain":
            tape = operators.tape_step if case.tape else None
            return Reversal(operators.step, operators.adjoint, n, tape_step=tape, **options)
        return Reversal(operators.chain(), n_steps=n, **options)

    def start(self) -> Any:
        """Return state 0: a new one, or the one of the sweep before."""
        case = self.case
        untouched = (
            not case.in_place and case.container == "new" and "writes input" not in (case.manners)
        )
        if self._states is None or not case.reuse or not untouched:
            self._states = self.operators.start()
            self.watch.flags(self._states)
        return self._states

    def forward(self, run: Reversal[Any, Any], state: Any) -> Any:
        """Run the forward sweep and compare its last state."""
        until = None
        if self.case.until:
            until = self._until
        last = run.forward(state, until)
        if fingerprint(leaves(last)) != self.answer[0]:
            self.seen.found("another last state", self._beside)
        return last

    def _until(self, state: Any, i: int) -> bool:
        return i >= self.operators.n_steps

    def reverse(self, run: Reversal[Any, Any], last: Any, start: Any) -> None:
        """Run the reverse sweep and compare its gradient."""
        gradient = run.reverse(self.operators.begin(last, start))
        self.judge(gradient, run.plan)

    def judge(self, gradient: Any, plan: Any) -> None:
        """Compare a gradient with store-all, and the tapes that lived with the budget."""
        case, seen = self.case, self.seen
        if fingerprint(leaves(gradient)) != self.answer[1]:
            seen.found("another gradient", self._beside)
        else:
            seen.outcomes["exact"] += 1
        if 0 <= case.none_at < case.n:
            seen.found("an adjoint step returned None, and nothing was raised", self._beside)
        most, size = self.operators.tapes.most, self.operators.tape_bytes
        room = planned.state_bytes(case) * case.slots + (case.in_bytes or 0)
        # An adjoint may be a part of its tape, or keep it; to measure, two are held once.
        two = case.adjoint == "of the tape" or case.costs == "measured" or case.keeps == "given"
        working = (case.block or 1) * (2 if two else 1)
        over = (most - working) * size - room
        # Beside the checkpoints: the live state, the one before it, the last one; those in a block.
        beside = 3 + case.block + (case.keeps == "given")
        states = self.operators.states.most - beside
        if states * planned.state_bytes(case) > room and not case.until:
            seen.found(f"over the budget: {states} states and {beside} more lived", self._beside)
        if over > 0 and not case.one_tape:
            seen.found(
                f"over the budget: {most} tapes of {size} bytes lived, {room} bytes given",
                self._beside,
            )

    def sweep(self, run: Reversal[Any, Any]) -> None:
        state = self.start()
        last = self.forward(run, state)
        self.reverse(run, last, state)

    @contextlib.contextmanager
    def judged(self) -> Iterator[None]:
        """Accept documented errors, where the case is such that there may be one."""
        if self.fault.raised is not None:
            self.fault.raised = None  # its traceback refers to tapes
            gc.collect()
        try:
            yield
        except BaseException as error:
            self.judge_error(error)

    def judge_error(self, error: BaseException) -> None:
        seen, raised = self.seen, self.fault.raised
        name = type(error).__name__
        if raised is not None and (error is raised or type(error) is type(raised)):
            seen.outcomes[f"raised {name}"] += 1
        elif isinstance(error, MultistageError):
            seen.outcomes[f"refused {name}"] += 1
            seen.refusals.append(str(error))
            # To find the step that changed the layout, steps run again, and may raise.
            looked_back = isinstance(error, StateError) and error.state is not None
            if raised is not None and not looked_back:
                seen.found(f"{raised!r} became {name}: {error}", self._beside)
            elif not self.case.odd:
                seen.found(f"refused: {name}: {error}", self._beside)
        elif type(error) is ValueError and "read-only" in str(error):
            # NumPy's, for arrays that are read-only for two reasons or for the case's own.
            seen.outcomes["refused by NumPy"] += 1
            own = "readonly" in (*self.case.manners, *self.case.starts)
            if not (own or getattr(error, "__notes__", None)):
                seen.found(f"a read-only array is not told: {error}", self._beside)
        else:
            cause = error
            while cause is not None and cause is not raised:
                cause = cause.__cause__
            where = _where(error)
            how = "hidden" if cause is not None else "raw"
            seen.found(f"{how} {name}: {error} ({where})", self._beside)

    # ----------------------------------------------------------------- the plays

    def sweeps(self) -> None:
        with self.judged(), self.reversal() as run:
            for _ in range(self.case.sweeps):
                with self.judged():
                    self.sweep(run)

    def call(self) -> None:
        case, operators = self.case, self.operators
        with self.judged():
            state = self.start()
            result = multistage.reverse(
                operators.step,
                operators.adjoint,
                state,
                lambda last: operators.begin(last, state),
                case.n,
                tape_step=operators.tape_step if case.tape else None,
                memory=planned.budget(case),
                tiers=planned.tiers(case, self.folder),
                planner=planned.planner(case, case.n),
                costs=planned.costs(case),
                progress=False,
            )
            overwritten = case.begin != "fresh" and case.adjoint == "in place"
            if fingerprint(leaves(result.last_state)) != self.answer[0] and not overwritten:
                self.seen.found("another last state", self._beside)
            self.judge(result.adjoint, None)

    def faulty(self) -> None:
        """One sweep stopped by its operators, the next one whole."""
        with self.judged(), self.reversal() as run:
            for _ in range(2):
                self.fault.left = 1 + int(self.case.fault_at * 3 * self.case.n)
                with self.judged():
                    self.sweep(run)
            self.fault.left = -1
            with self.judged():
                self.sweep(run)
            with self.judged(), contextlib.suppress(multistage.errors.ArgumentError):
                str(run.report())

    def ctrl_c(self) -> None:
        """Ctrl-C at an instruction of the package, then another sweep."""
        run = None
        with self.judged(), self._interrupted(int(10 ** (1 + 3.5 * self.case.fault_at))):
            run = self.reversal()
            with run:
                for _ in range(self.case.sweeps):
                    self.sweep(run)
        if run is None:
            return
        with self.judged(), run:
            self.sweep(run)

    @contextlib.contextmanager
    def _interrupted(self, count: int) -> Iterator[None]:
        left = count
        opcodes = bool(self.case.seed % 3 == 0)

        def local(frame: Any, event: str, argument: Any) -> Any:
            nonlocal left
            if event == ("opcode" if opcodes else "line"):
                left -= 1
                if left <= 0 and frame.f_lasti not in _never_interrupted(frame.f_code):
                    sys.settrace(None)
                    self.fault.raised = KeyboardInterrupt()
                    signal.raise_signal(signal.SIGINT)
            return local

        def entered(frame: Any, event: str, argument: Any) -> Any:
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            frame.f_trace_opcodes = opcodes
            return local

        sys.settrace(entered)
        try:
            yield
        finally:
            sys.settrace(None)

    def turns(self) -> None:
        """Two runs, whose calls come in turn."""
        other = self._other()
        with contextlib.ExitStack() as both:
            runs = []
            for play in (self, other):
                with play.judged():
                    runs.append((play, both.enter_context(play.reversal())))
            for _ in range(self.case.sweeps):
                swept = []
                for play, run in runs:
                    with play.judged():
                        state = play.start()
                        swept.append((play, run, play.forward(run, state), state))
                if self.case.seed % 2:
                    swept.reverse()
                for play, run, last, state in swept:
                    with play.judged():
                        play.reverse(run, last, state)

    def _other(self) -> Play:
        other = replace(draw(self.case.seed + 1_000_003, "sweeps"), play="sweeps")
        if other.costs == "measured":
            other = replace(other, costs="right")
        folder = self.folder / "other"
        folder.mkdir(exist_ok=True)
        play = Play(other, folder, self.watch, self.seen)
        play._beside = other
        return play

    def threads(self) -> None:
        """Two runs in two threads."""
        plays = [self, self._other()]
        threads = [threading.Thread(target=play.sweeps) for play in plays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def store(self) -> None:
        """One store in two runs: refused, or both exact."""
        case = replace(self.case, seed=self.case.seed + 1)  # another state 0
        other = Play(case, self.folder, self.watch, self.seen)
        given = planned.tiers(self.case, self.folder)
        assert given is not None
        shared = [open_store(each) for each in given]
        with contextlib.ExitStack() as both:
            runs = []
            for play in (self, other):
                with play.judged():
                    runs.append((play, both.enter_context(play.reversal(tiers=shared))))
            swept = []
            for play, run in runs:
                with play.judged():
                    state = play.start()
                    swept.append((play, run, play.forward(run, state), state))
            for play, run, last, state in swept:
                with play.judged():
                    play.reverse(run, last, state)
        with self.judged(), self.reversal(tiers=shared) as run:  # it is free again
            self.sweep(run)

    def durable(self) -> None:
        """A run in a folder, stopped now and then, and resumed by another Reversal."""
        place = self.folder / "run"
        source = random.Random(self.case.seed)
        for attempt in range(4):
            self.fault.left = -1 if attempt == 3 else source.randint(1, 3 * self.case.n)
            # A sweep that is refused for its tapes has made one more than fits.
            self.operators.tapes.most = self.operators.tapes.now
            with self.judged():
                run = self.reversal(tiers=None, durable=place, durable_every_s=0.0)
                with run:
                    self.sweep(run)
        if place.exists() and not self.case.odd:
            self.seen.found("the folder of a complete run is left")
        if place.exists():
            import shutil

            shutil.rmtree(place)

    def dropped(self) -> None:
        """A run that is never closed, with a sweep in progress perhaps."""
        with self.judged():
            run = self.reversal()
            self.sweep(run)
            if self.case.seed % 2:
                self.forward(run, self.start())
        run = None
        gc.collect()

    def nested(self) -> None:
        """A run inside an operator of another."""
        inner = self._other()
        times = 0

        def called(kind: str, i: int) -> None:
            nonlocal times
            if i == 0 and times < 2:
                times += 1
                inner.sweeps()

        self.operators.called = called
        self.sweeps()

    def pyrevolve(self) -> None:
        dropin(self)


@cache
def _never_interrupted(code: types.CodeType) -> set[int]:
    """Return where Python looks for no signal, though it traces: at both ends of a `with`."""
    found: set[int] = set()
    steps = list(dis.get_instructions(code))
    for k, step in enumerate(steps):
        if step.opname in ("BEFORE_WITH", "SETUP_WITH"):
            found |= {each.offset for each in steps[k : k + 2]}
        if [each.argval for each in steps[k : k + 3]] == [None] * 3 and all(
            each.opname == "LOAD_CONST" for each in steps[k : k + 3]
        ):
            found |= {each.offset for each in steps[k : k + 6]}
    return found


def _where(error: BaseException) -> str:
    """Return the last place in the package that an error came through."""
    found, at = "outside", error.__traceback__
    while at is not None:
        name = at.tb_frame.f_code.co_filename
        if name.startswith(PACKAGE):
            found = f"{Path(name).name}:{at.tb_lineno}"
        at = at.tb_next
    return found


PLAYED: dict[str, Callable[[Play], None]] = {
    "sweeps": Play.sweeps,
    "call": Play.call,
    "fault": Play.faulty,
    "ctrl-c": Play.ctrl_c,
    "turns": Play.turns,
    "threads": Play.threads,
    "store": Play.store,
    "durable": Play.durable,
    "dropped": Play.dropped,
    "nested": Play.nested,
    "pyrevolve": Play.pyrevolve,
}
