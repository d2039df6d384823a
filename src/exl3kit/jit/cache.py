"""Compiled CUDA kernels on disk: cache_dir()/cuda/<arch>/<name>-<key>.cubin, and a .json beside it.

The key covers everything the machine code depends on. The .cubin is the compiler's bytes and
nothing else, so cuobjdump reads it; the .json carries entry point, resources and the sha256 of the
.cubin, and an entry is a hit only if they agree. Each file is written under a temporary name and
renamed. A lock keeps processes from compiling the same kernel; who does not get it in time compiles
for itself, without the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from exl3kit import env
from exl3kit.errors import MissingKernelError
from exl3kit.jit import compiler, source, toolkit
from exl3kit.jit.compiler import Compiled, Resources
from exl3kit.jit.spec import KernelSpec
from exl3kit.log import get_logger, warn_once

SCHEMA = 1  # of the entry: raise it when the .json or the stub changes its meaning
LOCK_SECONDS = 120.0  # longer than any kernel here compiles
_POLL_SECONDS = 0.05

_log = get_logger(__name__)


def cache_key(spec: KernelSpec, arch: str) -> str:
    """32 hex digits over schema, architecture, compiler, options, stub and all header text."""
    parts = (
        str(SCHEMA),
        arch,
        toolkit.nvrtc_version(),
        toolkit.header_digest(),
        repr(sorted(compiler.OPTIONS.items())),
        source.stub(spec),
        source.closure_digest(spec.header, source.SOURCES),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def entry_path(spec: KernelSpec, arch: str) -> Path:
    """Where the cubin of `spec` for `arch` is, or would be."""
    plain = re.sub(r"\w+::", "", spec.expression)
    readable = re.sub(r"\W+", "_", plain).strip("_")
    return env.cache_dir() / "cuda" / arch / f"{readable}-{cache_key(spec, arch)}.cubin"


def load_or_compile(spec: KernelSpec, arch: str) -> Compiled:
    """The kernel from disk, else compiled and stored.

    Raises CompileError, and MissingKernelError if EXL3KIT_JIT_FORBID is set and disk has none. A
    cache folder that cannot be written costs a warning and a compile in every process.
    """
    path = entry_path(spec, arch)
    found = read_entry(path)
    if found is not None:
        return found
    if env.jit_forbid():
        raise MissingKernelError(
            f"{spec} for {arch}: expected {path}, got none, and EXL3KIT_JIT_FORBID is set; run "
            f"`exl3kit cache build --arch {arch}` with this version and NVRTC "
            f"{toolkit.nvrtc_version()}"
        )
    with contextlib.ExitStack() as stack:
        can_store = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            can_store = stack.enter_context(_locked(path.with_suffix(".lock")))
        except OSError as error:
            _warn_unwritable(path.parent, error)
            can_store = False
        return read_entry(path) or _compile(spec, arch, path if can_store else None)


def _compile(spec: KernelSpec, arch: str, path: Path | None) -> Compiled:
    begin = time.monotonic()
    compiled = compiler.compile_spec(spec, arch)
    if env.jit_verbose():
        used = " ".join(f"{name}={value}" for name, value in asdict(compiled.resources).items())
        _log.warning("compiled %s for %s in %.2f s: %s", spec, arch, time.monotonic() - begin, used)
    if path is not None:
        try:
            write_entry(path, compiled)
        except OSError as error:
            _warn_unwritable(path.parent, error)
    return compiled


def _warn_unwritable(folder: Path, error: OSError) -> None:
    warn_once(
        _log,
        f"cuda-cache:{folder}",
        f"kernel cache {folder}: expected a writable folder, got {error}; kernels are compiled "
        "anew in every process until EXL3KIT_CACHE_DIR names one",
    )


def read_entry(path: Path) -> Compiled | None:
    """The entry at `path`, or None if it is absent, incomplete or damaged."""
    try:
        cubin = path.read_bytes()
        facts = json.loads(path.with_suffix(".json").read_bytes())
        if facts["sha256"] != hashlib.sha256(cubin).hexdigest():
            return None
        return Compiled(cubin, str(facts["symbol"]), Resources(**facts["resources"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_entry(path: Path, compiled: Compiled) -> None:
    """Store an entry; a reader sees the old one, none, or the new one, never half."""
    facts = {
        "sha256": hashlib.sha256(compiled.cubin).hexdigest(),
        "symbol": compiled.symbol,
        "resources": asdict(compiled.resources),
    }
    _replace(path, compiled.cubin)
    _replace(path.with_suffix(".json"), json.dumps(facts, indent=1).encode())


def _replace(path: Path, data: bytes) -> None:
    # Not from `tempfile`, whose files other users cannot read.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock at `path`; yields False if it was not to be had in LOCK_SECONDS."""
    deadline = time.monotonic() + LOCK_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(_POLL_SECONDS)
            else:
                yield True
                return
