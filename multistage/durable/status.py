"""What a durable folder holds, for people: `multistage status` and `multistage clean`."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tabulate import tabulate

from ..support.units import format_bytes, format_seconds
from .folder import LEFTOVERS, LOCK, RUN, Folder
from .headers import BadFile, RunFacts, plain
from .journal import RANK_NAME, Journal

# Of a label or the name of a leaf so much is shown.
_SHOWN = 44


@dataclass(frozen=True, slots=True)
class Status:
    """What a folder holds.

    Attributes
    ----------
    path : str
    resumable : bool
        Whether the call that began the run continues with it.
    reason : str
        Why, or why not, and what happens then.
    in_use : str
        The process that uses it now; empty if there is none.
    facts : RunFacts or None
        Of the run; None if there is none whose header can be used.
    n_steps : int or None
        Steps of the run; None without one, or while `until` has not found the end.
    forward_step : int
        The newest state on the disk; n_steps when the forward sweep is over.
    adjoint_step : int or None
        Steps from here on are reversed; None before the first adjoint is there.
    states, states_bytes : int
        Checkpoints, and their bytes.
    adjoints : int
        Adjoints that pass their checksum.
    leftovers, strangers : int
        Files of no use, and files of others.
    nbytes : int
        Bytes of all files but the lock.
    changed_s : float
        Seconds since a file last changed.
    """

    path: str
    resumable: bool
    reason: str
    in_use: str = ""
    facts: RunFacts | None = None
    n_steps: int | None = None
    forward_step: int = 0
    adjoint_step: int | None = None
    states: int = 0
    states_bytes: int = 0
    adjoints: int = 0
    leftovers: int = 0
    strangers: int = 0
    nbytes: int = 0
    changed_s: float = 0.0

    @property
    def begun(self) -> bool:
        """Whether there is a run whose header can be used."""
        return self.facts is not None

    @property
    def complete(self) -> bool:
        """Whether the gradient is there."""
        return self.adjoint_step == 0

    def rows(self) -> list[tuple[str, str]]:
        """Return the table's rows: what, value."""
        n, facts, rows = self.n_steps, self.facts, list[tuple[str, str]]()
        if facts is not None:
            label = plain(facts.label, _SHOWN) or "-"
            size = format_bytes(facts.record_bytes)
            held = format_bytes(self.states_bytes)
            forward, reverse = f"state {self.forward_step}, the last is not known yet", "-"
            if n is not None:
                forward = f"state {self.forward_step} of {n} ({_share(self.forward_step, n)})"
            if self.adjoint_step is not None and n is not None:
                done = n - self.adjoint_step
                reverse = f"adjoint at step {self.adjoint_step} ({_share(done, n)})"
            rows += [
                ("label", label),
                ("written by", f"multistage {plain(facts.package, _SHOWN)}"),
                (
                    "state 0" if facts.unequal else "state",
                    f"{plain(_leaves(facts.leaves), _SHOWN)}, {size}",
                ),
                ("forward", forward),
                ("reverse", reverse),
                ("checkpoints", f"{self.states} in {held}"),
                ("adjoints", f"{self.adjoints}"),
            ]
        rows.append(("all files", format_bytes(self.nbytes)))
        if self.leftovers:
            rows.append(("leftovers", f"{self.leftovers} files"))
        if self.strangers:
            rows.append(("files of others", f"{self.strangers}"))
        rows += [
            ("last change", f"{format_seconds(self.changed_s)} ago"),
            ("in use by", self.in_use or "nobody"),
            ("resumable", f"{'yes' if self.resumable else 'no'}: {self.reason}"),
        ]
        return rows

    def __str__(self) -> str:
        table = tabulate(self.rows(), tablefmt="plain", disable_numparse=True)
        return f"{plain(self.path, 200)}\n{table}"


def inspect(path: str | os.PathLike[str]) -> Status:
    """Return what a durable folder holds; nothing in it is changed.

    Headers are verified, and the records of adjoints; those of states are
    when they are read.

    Raises
    ------
    StoreError
        If there is no such folder, or it is refused: not yours, or writable
        by others.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(inspect(folder).reason)
    it holds no run
    """
    with contextlib.closing(Folder(Path(path))) as folder:
        return _inspect(folder)


def _files(folder: Folder) -> dict[str, os.stat_result]:
    """Return what is known of each name; those that go meanwhile are left out."""
    found = {}
    for name in folder.names():
        with contextlib.suppress(OSError):
            found[name] = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
    return found


def _inspect(folder: Folder) -> Status:
    run, files = folder.known(), _files(folder)
    newest = max(each.st_mtime for each in (os.fstat(folder.fd), *files.values()))
    base = Status(
        path=str(folder.path),
        resumable=False,
        reason="it holds no run",
        in_use=folder.holder() if folder.in_use() else "",
        strangers=len(folder.strangers()) + len(folder.others(run)),
        leftovers=sum(name.startswith(LEFTOVERS) for name in folder.ours(run)),
        nbytes=sum(each.st_size for name, each in files.items() if name != LOCK),
        changed_s=max(0.0, time.time() - newest),
    )
    try:
        journal = Journal.of(folder)
    except FileNotFoundError:
        return base
    except (OSError, BadFile) as error:
        return replace(base, reason=f"its file {RUN!r} cannot be used: {error}")
    return _progress(folder, base, journal)


def _progress(folder: Folder, base: Status, journal: Journal) -> Status:
    n, ended = journal.n_steps, journal.last is not None
    files = list(journal.states(folder))
    found = [step for each in files for step in each.steps]
    forward = max((step for step in found if n is None or step < n), default=0)
    adjoint = journal.adjoints[0].least if journal.adjoints else None
    if folder.strangers():
        reason, resumable = "it holds files of others beside the run", False
    elif base.in_use:
        reason, resumable = "it is running", False
    elif adjoint == 0:
        reason, resumable = "the same call returns the gradient at once", True
    elif adjoint is not None:
        reason, resumable = f"the same call resumes at adjoint step {adjoint - 1}", True
    elif ended:
        reason, resumable = "the same call resumes with the reverse sweep", True
    else:
        reason, resumable = f"the same call resumes from state {forward}", True
    return replace(
        base,
        reason=reason,
        resumable=resumable,
        facts=journal.facts,
        n_steps=n,
        forward_step=n if ended and n is not None else forward,
        adjoint_step=adjoint,
        states=len(found),
        states_bytes=sum(each.nbytes for each in files),
        adjoints=len(journal.adjoints),
    )


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What `clean` removed, or would remove.

    Attributes
    ----------
    path : str
    files : tuple of (name, bytes)
    kept : tuple of str
        Names in the folder that its run did not write, or that could not be removed.
    folder : bool
        Whether the folder goes too.
    dry_run : bool
        Whether nothing was removed yet.
    """

    path: str
    files: tuple[tuple[str, int], ...] = ()
    kept: tuple[str, ...] = ()
    folder: bool = False
    dry_run: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return sum(nbytes for _, nbytes in self.files)

    def __str__(self) -> str:
        path = plain(self.path, 200)
        removed = "would remove" if self.dry_run else "removed"
        lines = []
        if self.dry_run:
            lines = [f"{removed} {name} ({format_bytes(nbytes)})" for name, nbytes in self.files]
        if self.files or self.folder:
            what = f"{len(self.files)} files, {format_bytes(self.nbytes)}"
            folder = "the folder" if self.folder else "the folder stays"
            lines.append(f"{removed}: {what}, {folder} {path}")
        else:
            lines.append(f"nothing to remove: {path} holds no file of a durable run")
        if self.kept:
            lines.append(f"kept: {_some(self.kept)}")
        return "\n".join(lines)


def _some(names: tuple[str, ...], most: int = 5) -> str:
    shown = ", ".join(repr(plain(name)) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def clean(path: str | os.PathLike[str], *, force: bool = False, dry_run: bool = False) -> Cleaned:
    """Remove what a run left in its folder, and the folder if it is empty then.

    Only files that begin with the format's magic and the number of the
    folder's run are removed, whatever the names of others.

    Parameters
    ----------
    force : bool
        Remove even a run that can be resumed, or whose gradient was not collected.
    dry_run : bool
        Say what would be removed; change nothing.

    Raises
    ------
    StoreError
        If the folder is refused, is in use, or holds what only `force` removes.
    """
    with contextlib.closing(Folder(Path(path))) as folder:
        run = folder.known()
        if run is None:  # not even a lock is left there
            return Cleaned(str(path), kept=tuple(folder.names()), dry_run=dry_run)
        if dry_run:
            if folder.in_use():
                raise folder.refused(f"it is in use by {folder.holder()}")
        else:
            if not folder.lock():
                raise folder.refused("it was removed just now")
            run = folder.run
        # Not through `_inspect`'s eyes alone: the lock is ours now.
        found = replace(_inspect(folder), in_use="")
        if found.begun and not force:
            what = "a complete run" if found.complete else "a run that can be resumed"
            raise folder.refused(
                f"it holds {what} ({', '.join(_progress_of(found))}); add --force to remove it"
            )
        sizes = {name: each.st_size for name, each in _files(folder).items()}
        before = {name: sizes.get(name, 0) for name in folder.ours(run)}
        others = sorted(set(folder.names()) - set(before))
        if dry_run:
            files = tuple(before.items())
            return Cleaned(str(path), files, tuple(others), not others, dry_run)
        folder.remove()
        gone = not os.fstat(folder.fd).st_nlink
        left = [] if gone else folder.names()
        files = tuple((name, nbytes) for name, nbytes in before.items() if name not in left)
        return Cleaned(str(path), files, tuple(left), gone)


def rank_folders(path: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of an MPI program's ranks in a folder; none if it is not of one.

    Raises
    ------
    StoreError
        If there is no such folder, or it is refused.
    """
    with contextlib.closing(Folder(Path(path))) as folder:
        return [folder.path / name for name in folder.names() if RANK_NAME.fullmatch(name)]


def clean_ranks(
    path: str | os.PathLike[str], *, force: bool = False, dry_run: bool = False
) -> list[Cleaned]:
    """Do what `clean` does; of an MPI program in every rank's folder, or in none if one refuses."""
    folders = rank_folders(path)
    if not folders:
        return [clean(path, force=force, dry_run=dry_run)]
    would = [clean(folder, force=force, dry_run=True) for folder in folders]
    if dry_run:
        return would
    done = [clean(folder, force=force) for folder in folders]
    with contextlib.suppress(OSError):  # others' files are in it
        Path(path).rmdir()
    return done


def _progress_of(found: Status) -> list[str]:
    rows = dict(found.rows())
    return [f"{what}: {rows[what]}" for what in ("forward", "reverse") if rows[what] != "-"]


def _share(done: int, n: int) -> str:
    return f"{100 * done / n:.1f} %"


def _leaves(leaves: tuple[tuple[str, str, str], ...]) -> str:
    if len(leaves) != 1:
        return f"{len(leaves)} arrays"
    path, shape, dtype = leaves[0]
    return f"{path or 'array'} {shape} {dtype}"
