"""Build and load the CPU kernels: kernels/cpu/*.cpp -> one shared library in the cache folder.

The library holds every instruction-set tier the compiler can make, one set of files a tier, and the
tier is chosen at run time. A cache entry is named by a digest of all sources, flags and the
compiler's version, is made in a temporary folder and renamed into place whole, and carries the
sha256 of its library: loading a truncated ELF file can kill the process, so it is checked first.
A lock keeps two processes (the workers of a tensor-parallel server) from compiling the same twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from exl3kit import env
from exl3kit.errors import CompileError, UnsupportedError
from exl3kit.log import get_logger, warn_once

SOURCES = Path(__file__).parents[1] / "kernels" / "cpu"
LIBRARY = "libexl3kit_cpu.so"
DIGEST = LIBRARY + ".sha256"
ISA_NAMES = ("portable", "avx2", "avx512", "avx512fp16")

# Contraction is off so that code which must round twice does; the kernels ask for fma by name.
# Warnings are off because they would bury the error that a CompileError carries.
_COMMON_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-w",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_TIER_FLAGS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512fp16": (*_AVX512, "-mavx512vbmi", "-mavx512fp16"),
}

_log = get_logger(__name__)


@functools.cache
def cpu_library() -> ctypes.CDLL | None:
    """The kernel library, built if the cache has none; None after one warning without a compiler.

    Raises CompileError, with the compiler's output, when a compiler is there and fails, or when
    what it has just made cannot be loaded.
    """
    compiler = env.cxx()
    if compiler is None:
        warn_once(
            _log,
            "no-compiler",
            "no C++ compiler found, EXL3 runs on the slow torch reference: "
            "install g++ or set EXL3KIT_CXX",
        )
        return None
    path = library_path(compiler)
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # damaged with its digest, or of another C library: a miss like any other
        (path.parent / DIGEST).unlink(missing_ok=True)
    path = library_path(compiler)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(
            f"{path}: expected a library that loads, got {error}; where the file system allows no "
            "programs (noexec), set EXL3KIT_CACHE_DIR to a folder that does"
        ) from error


@functools.cache
def cpu_isa() -> int:
    """The tier in use, an index into ISA_NAMES: the machine's best, or what EXL3KIT_CPU_ISA names.

    Raises UnsupportedError when the variable asks for more than the machine and compiler have.
    """
    library = cpu_library()
    best = library.exl3_cpu_isa_max() if library is not None else 0
    request = env.cpu_isa_request()
    if request == "auto":
        return best
    if ISA_NAMES.index(request) > best:
        raise UnsupportedError(
            f"EXL3KIT_CPU_ISA: expected at most {ISA_NAMES[best]!r} on this machine and compiler, "
            f"got {request!r}; unset it or choose a lower one"
        )
    return ISA_NAMES.index(request)


def library_path(compiler: str) -> Path:
    """Path of a whole, checked library for the present sources; compiles when there is none."""
    folder = env.cache_dir() / "cpu" / _cache_key(compiler)
    if _is_whole(folder):
        return folder / LIBRARY
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not _is_whole(folder):
                _build(compiler, folder)
    except OSError as error:
        raise CompileError(
            f"kernel cache {folder.parent}: expected a writable folder, got {error}; "
            "set EXL3KIT_CACHE_DIR to one"
        ) from error
    return folder / LIBRARY


def _cache_key(compiler: str) -> str:
    digest = hashlib.sha256()
    version = _run([compiler, "-v"]).stderr
    for part in (compiler, version, platform.machine(), repr(_COMMON_FLAGS), repr(_TIER_FLAGS)):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _is_whole(folder: Path) -> bool:
    try:
        data = (folder / LIBRARY).read_bytes()
        return (folder / DIGEST).read_bytes() == hashlib.sha256(data).hexdigest().encode()
    except OSError:
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        # A file system without locks costs a second compile, not correctness: the rename is atomic.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(compiler: str, folder: Path) -> None:
    _log.info("compiling the CPU kernels into %s", folder)
    # Not from `tempfile`, whose folders other users cannot enter.
    work = folder.with_name(f".build-{uuid.uuid4().hex}")
    work.mkdir()
    try:
        _compile(compiler, work)
        library = work / LIBRARY
        (work / DIGEST).write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        if folder.exists():
            os.replace(folder, work / "damaged")
        try:
            os.rename(work, folder)
        except OSError:
            if not _is_whole(folder):  # otherwise another process, without locks, was first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(folder / "damaged", ignore_errors=True)


def _compile(compiler: str, work: Path) -> None:
    tiers = _available_tiers(compiler)
    defines = [f"-DEXL3_HAVE_{tier.upper()}=1" for tier in tiers]
    commands = {}
    for source in sorted(SOURCES.glob("*.cpp")):
        tier = source.stem.rpartition("_")[2]
        if tier in _TIER_FLAGS and tier not in tiers:
            continue
        flags = [*_COMMON_FLAGS, *defines, *_TIER_FLAGS.get(tier, ())]
        target = work / f"{source.stem}.o"
        commands[target] = [compiler, *flags, "-c", str(source), "-o", str(target)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run_compiler, commands.values()))
    objects = [str(target) for target in commands]
    _run_compiler([compiler, "-shared", "-pthread", *objects, "-o", str(work / LIBRARY)])
    for target in commands:
        target.unlink()


def _available_tiers(compiler: str) -> list[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    probe = ["-x", "c++", "-fsyntax-only", os.devnull]
    return [
        tier
        for tier, flags in _TIER_FLAGS.items()
        if not _run([compiler, *flags, *probe]).returncode
    ]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _run_compiler(command: list[str]) -> None:
    done = _run(command)
    if done.returncode:
        raise CompileError(
            f"CPU kernels: {command[0]} exited with {done.returncode}, expected 0\n"
            f"command: {' '.join(command)}\n{done.stdout}{done.stderr}"
        )


def main() -> None:
    """Build every tier and print where the library is and which tier this machine would use."""
    compiler = env.cxx()
    if compiler is None:
        raise UnsupportedError("C++ compiler: expected g++ on PATH or EXL3KIT_CXX, got none")
    print(f"library  {library_path(compiler)}")
    print(f"tiers    portable {' '.join(_available_tiers(compiler))}")
    print(f"in use   {ISA_NAMES[cpu_isa()]}")


if __name__ == "__main__":
    main()
