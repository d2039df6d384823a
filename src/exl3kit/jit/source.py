"""What is compiled: a stub of two lines, and the headers it reaches.

The stub includes one header and names one template instantiation, so a kernel's source is fixed by
its spec and by the text of the headers. Headers may include one another by quotes, and those of
`toolkit.HEADERS` by angle brackets; anything else is an error: the cache key would not cover it.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from exl3kit.errors import CompileError
from exl3kit.jit.spec import KernelSpec
from exl3kit.jit.toolkit import HEADERS

SOURCES = Path(__file__).parents[1] / "kernels" / "cuda"
# Read by a host compiler only: the headers that both compile guard it by __CUDACC_RTC__.
_HOST_ONLY = ("cmath", "cstdint", "cstring")

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>|(.+))', re.MULTILINE)


def stub(spec: KernelSpec) -> str:
    """The text handed to the compiler: the header, and a reference to the instantiation."""
    return f'#include "{spec.header}"\n// {spec.expression}\n'


def closure(header: str, folder: Path) -> tuple[Path, ...]:
    """Every file of `folder` that `header` reaches, itself included, sorted.

    CompileError for a file that is not there or an include that is not allowed.
    """
    found: set[Path] = set()
    _walk(header, header, folder, found)
    return tuple(sorted(found))


def _walk(header: str, includer: str, folder: Path, found: set[Path]) -> None:
    path = folder / header
    if not path.is_file():
        raise CompileError(f"{includer}: expected a file {header} in {folder}, got none")
    if path in found:
        return
    found.add(path)
    for own, system, other in _INCLUDE.findall(path.read_text(encoding="utf-8")):
        if own:
            _walk(own, header, folder, found)
        elif system not in HEADERS + _HOST_ONLY:
            raise CompileError(
                f"{header}: includes {system or other.strip()!r}, expected a header of "
                f"kernels/cuda in quotes or one of {', '.join(HEADERS + _HOST_ONLY)}"
            )


@functools.cache
def closure_digest(header: str, folder: Path) -> str:
    """sha256 over names and bytes of the closure; read once a process."""
    digest = hashlib.sha256()
    for path in closure(header, folder):
        data = path.read_bytes()
        digest.update(f"{path.name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
