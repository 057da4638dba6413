"""core.h as ctypes declares it, against what a compiler makes of it."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from multistage import native
from multistage.native.header import Header

STRUCTURES = {
    "chain_t": native.ChainStruct,
    "joint_t": native.Joint,
    "program_t": native.JointProgram,
    "dual_t": native.JointDual,
    "sweep_t": native.SweepCall,
    "piece_t": native.Piece,
    "stream_view_t": native.StreamView,
    "stream_options_t": native.StreamOptions,
    "stream_record_t": native.StreamRecord,
}
FOLDER = Path(native.__file__).parent


def test_every_structure_lies_in_memory_as_the_compiler_has_it(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    asked = [
        f'printf("{name} {field} %zu %zu\\n", offsetof({name}, {field}), '
        f"sizeof((({name} *)0)->{field}));"
        for name, made in STRUCTURES.items()
        for field, _ in made._fields_
    ] + [f'printf("{name} sizeof %zu 0\\n", sizeof({name}));' for name in STRUCTURES]
    headers = ("<stddef.h>", "<stdio.h>", '"core.h"', '"stream.h"')
    code = "".join(f"#include {name}\n" for name in headers) + "int main(void) {\n"
    (tmp_path / "main.c").write_text(code + "\n".join(asked) + "\nreturn 0; }")
    command = ["cc", "-std=gnu11", f"-I{FOLDER}", "main.c", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    told = subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout
    expected = [
        f"{name} {field} {getattr(made, field).offset} {getattr(made, field).size}"
        for name, made in STRUCTURES.items()
        for field, _ in made._fields_
    ] + [f"{name} sizeof {ctypes.sizeof(made)} 0" for name, made in STRUCTURES.items()]
    assert told.splitlines() == expected


def test_types_of_functions():
    header = Header(
        "#define EXPORT __attribute__((x))\n"
        "/* two\n lines */\nenum { A, B };\n"
        "typedef struct { int64_t n; const double *a, *b; } pair_t;\n"
        "typedef struct hidden hidden_t;\n"
        "EXPORT void ms_all(int64_t n, double x, uint64_t u, const float *a,\n"
        "                   const pair_t *p, hidden_t *h);\n"
        "EXPORT double ms_none(void);\n"
    )

    Pair = header.structure("pair_t")

    class Library:
        ms_all = type("f", (), {})()
        ms_none = type("f", (), {})()

    header.declare(Library)
    assert [name for name, _ in Pair._fields_] == ["n", "a", "b"]
    assert Library.ms_all.restype is None and Library.ms_none.restype is ctypes.c_double
    assert Library.ms_none.argtypes == []
    assert Library.ms_all.argtypes == [
        ctypes.c_int64,
        ctypes.c_double,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.POINTER(Pair),
        ctypes.c_void_p,
    ]


@pytest.mark.parametrize(
    "text",
    [
        "int64_t ms_lost(void);",
        "EXPORT int64_t ms_open(int64_t n;",
        "typedef struct { int64_t n; } a_t, *b_t;",
        "union { int64_t n; };",
    ],
)
def test_unknown_declarations_are_errors(text):
    with pytest.raises(ValueError, match="not understood"):
        Header(text)


def test_a_value_of_an_unknown_type_is_an_error():
    header = Header("EXPORT int64_t ms_f(int32_t n);")
    with pytest.raises(ValueError, match="int32_t"):
        header.declare(type("Library", (), {"ms_f": type("f", (), {})()}))
