"""The layouts of XLA's interface in `native/xla.h` are those of XLA's own header."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import multistage

SOURCES = Path(multistage.__file__).parent / "native"
STRUCTURES = {
    "xla_extension_t": ("XLA_FFI_Extension_Base", "size struct_size", "kind type", "next next"),
    "xla_version_t": (
        "XLA_FFI_Api_Version",
        "extensions extension_start",
        "major major_version",
        "minor minor_version",
    ),
    "xla_metadata_t": ("XLA_FFI_Metadata", "version api_version", "traits traits"),
    "xla_metadata_extension_t": ("XLA_FFI_Metadata_Extension", "metadata metadata"),
    "xla_error_args_t": ("XLA_FFI_Error_Create_Args", "message message", "code errc"),
    "xla_api_t": ("XLA_FFI_Api", "version api_version", "error XLA_FFI_Error_Create"),
    "xla_buffer_t": ("XLA_FFI_Buffer", "type dtype", "data data", "rank rank", "dims dims"),
    "xla_buffers_t": ("XLA_FFI_Args", "count size", "kinds types", "buffers args"),
    "xla_text_t": ("XLA_FFI_ByteSpan", "text ptr", "length len"),
    "xla_scalar_t": ("XLA_FFI_Scalar", "type dtype", "value value"),
    "xla_attributes_t": (
        "XLA_FFI_Attrs",
        "count size",
        "kinds types",
        "names names",
        "values attrs",
    ),
    "xla_call_t": (
        "XLA_FFI_CallFrame",
        "extensions extension_start",
        "api api",
        "context ctx",
        "stage stage",
        "arguments args",
        "results rets",
        "attributes attrs",
    ),
}
NUMBERS = {
    "XLA_METADATA": "XLA_FFI_Extension_Metadata",
    "XLA_STRING": "XLA_FFI_AttrType_STRING",
    "XLA_RESOURCE_EXHAUSTED": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED",
    "XLA_FAILED_PRECONDITION": "XLA_FFI_Error_Code_FAILED_PRECONDITION",
    "XLA_INTERNAL": "XLA_FFI_Error_Code_INTERNAL",
    "XLA_MAJOR": "XLA_FFI_API_MAJOR",
    "18": "XLA_FFI_DataType_C128",
    "5": "XLA_FFI_DataType_S64",
    "9": "XLA_FFI_DataType_U64",
    "12": "XLA_FFI_DataType_F64",
    "15": "XLA_FFI_DataType_C64",
    "4": "XLA_FFI_DataType_S32",
    "8": "XLA_FFI_DataType_U32",
    "11": "XLA_FFI_DataType_F32",
    "3": "XLA_FFI_DataType_S16",
    "7": "XLA_FFI_DataType_U16",
    "10": "XLA_FFI_DataType_F16",
    "16": "XLA_FFI_DataType_BF16",
}


def claims():
    yield "XLA_MINOR <= XLA_FFI_API_MINOR"
    yield from (f"(int){ours} == (int){theirs}" for ours, theirs in NUMBERS.items())
    for ours, (theirs, *fields) in STRUCTURES.items():
        for field in fields:
            one, other = field.split()
            yield f"offsetof({ours}, {one}) == offsetof({theirs}, {other})"
    yield "sizeof(xla_buffers_t) == sizeof(XLA_FFI_Args)"
    yield "sizeof(xla_buffers_t) == sizeof(XLA_FFI_Rets)"
    yield "offsetof(XLA_FFI_Rets, rets) == offsetof(XLA_FFI_Args, args)"
    for pair in ("xla_text_t XLA_FFI_ByteSpan", "xla_buffer_t XLA_FFI_Buffer"):
        one, other = pair.split()
        yield f"sizeof({one}) == sizeof({other})"


def test_layouts(tmp_path):
    ffi = pytest.importorskip("jax").ffi
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    lines = ["#include <xla/ffi/api/c_api.h>", '#include "xla.h"']
    lines += [f'_Static_assert({claim}, "{claim}");' for claim in claims()]
    source = tmp_path / "layouts.c"
    source.write_text("\n".join([*lines, ""]))
    flags = ["-fsyntax-only", "-std=c11", f"-I{SOURCES}", f"-I{ffi.include_dir()}"]
    made = subprocess.run([compiler, *flags, str(source)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
