"""Run pytest with another build of the C core: `python sanitized.py LIBRARY PYTEST-ARGUMENTS`."""

import importlib.machinery
import importlib.util
import sys
from typing import Any

NAME = "multistage.native._native"


def main() -> int:
    library, *arguments = sys.argv[1:]
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> Any:
        # However the package is installed, this is how it asks for its core.
        if name == NAME:
            return importlib.machinery.ModuleSpec(name, None, origin=library)
        return find(name, package)

    importlib.util.find_spec = found
    from multistage import native

    assert native.LIBRARY is not None
    assert native.LIBRARY._name == library
    import pytest

    return int(pytest.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
