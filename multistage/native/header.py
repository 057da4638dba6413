"""core.h, read: the structures and functions of the C core as ctypes declares them.

Every declaration stands once, in C.  The parser knows the small part of C that
core.h keeps to and takes all else for an error.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NUMBERS: dict[str, Any] = {
    "void": None,
    "double": ctypes.c_double,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
}
_NOT_READ = re.compile(r"/\*.*?\*/|^#[^\n]*$|^enum\b[^;]*;", re.DOTALL | re.MULTILINE)
_STRUCTURE = re.compile(r"typedef struct(?: \w+)? \{(.*?)\} (\w+);", re.DOTALL)
_OPAQUE = re.compile(r"typedef struct \w+ \w+;")
_CALLBACK = re.compile(r"typedef (\w+) (\w+)\(([^)]*)\);")
_FUNCTION = re.compile(r"EXPORT (\w+) (\w+)\(([^)]*)\);")
_DECLARED = re.compile(r"(?:const |struct |_Atomic )*(\w+) (.+)", re.DOTALL)


class Struct(ctypes.Structure):
    """A structure of the header; `owner` holds the memory that it points to."""

    owner: object = None


class Header:
    """A header file of the C core.

    Parameters
    ----------
    text : str
        Of the file.

    Raises
    ------
    ValueError
        For a declaration that is not understood.
    """

    def __init__(self, text: str) -> None:
        code = _NOT_READ.sub("", text)
        self._fields = {name: body for body, name in _STRUCTURE.findall(code)}
        code = _OPAQUE.sub("", _STRUCTURE.sub("", code))
        self._known: dict[str, Any] = {}
        for result, name, parameters in _CALLBACK.findall(code):
            types = self._types(parameters)
            self._known[name] = ctypes.CFUNCTYPE(_NUMBERS[result], *types)
        code = _CALLBACK.sub("", code)
        self._functions = {name: (result, given) for result, name, given in _FUNCTION.findall(code)}
        if left := _FUNCTION.sub("", code).strip():
            raise ValueError(f"core.h: this is not understood: {left.splitlines()[0]!r}")

    def structure(self, name: str) -> type[Struct]:
        """Return the class of a structure of the header."""
        fields = [
            each
            for declaration in self._fields[name].split(";")
            if declaration.strip()
            for each in self._declared(declaration)
        ]
        made: type[Struct] = type(name, (Struct,), {"_fields_": fields})
        self._known[name] = made
        return made

    def callback(self, name: str) -> type[ctypes._CFunctionType]:
        """Return the class of pointers to a function that C calls."""
        kind: type[ctypes._CFunctionType] = self._known[name]
        return kind

    def declare(self, library: ctypes.CDLL) -> None:
        """Tell a library the types of its functions; on Linux alone there are streams.

        Raises
        ------
        AttributeError
            If it lacks one of them.
        """
        for name, (result, parameters) in self._functions.items():
            if name.startswith(("ms_stream", "ms_loop")) and sys.platform != "linux":
                continue
            function = getattr(library, name)
            function.restype = _NUMBERS[result]
            function.argtypes = self._types(parameters)

    def _types(self, parameters: str) -> list[Any]:
        if parameters.strip() == "void":
            return []
        return [kind for given in parameters.split(",") for _, kind in self._declared(given)]

    def _declared(self, declaration: str) -> Iterator[tuple[str, Any]]:
        """Yield name and type of each variable in `const double *a, b`."""
        found = _DECLARED.fullmatch(declaration.strip())
        if found is None:
            raise ValueError(f"core.h: this is not understood: {declaration.strip()!r}")
        base, names = found.groups()
        for name in names.split(","):
            yield name.strip().lstrip("*"), self._kind(base, name.count("*"))

    def _kind(self, base: str, stars: int) -> Any:
        if not stars:
            if base not in _NUMBERS:
                raise ValueError(f"core.h: a value of type {base} is not understood")
            return _NUMBERS[base]
        known = self._known.get(base)
        if known is None or stars > 1:
            return ctypes.c_void_p  # a NumPy array's `ctypes.data`, or memory of C alone
        return ctypes.POINTER(known) if issubclass(known, ctypes.Structure) else known


def sum_of_sources(folder: Path) -> int:
    """Return the number that CMakeLists.txt makes of the sources in `folder`; 0 if none are."""
    found = [*folder.glob("*.[ch]"), *folder.glob("xxhash/*.h")]
    sources = sorted(found, key=lambda path: path.relative_to(folder).as_posix())
    if not any(path.suffix == ".c" for path in sources):
        return 0  # of an installed package, built and installed in one go
    sums = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in sources)
    return int(hashlib.sha256(sums.encode()).hexdigest()[:15], 16)
