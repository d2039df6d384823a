"""The CPU build: cache, damage, races, failures, choice of a tier; on a library of one line."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exl3kit import env, log
from exl3kit.errors import CompileError, UnsupportedError
from exl3kit.jit import cpu

GOOD = """
extern "C" __attribute__((visibility("default"))) int exl3_cpu_isa_max(void) { return ANSWER; }
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One source file in place of the kernels, an empty cache, and nothing remembered."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "one.cpp").write_text(GOOD.replace("ANSWER", "1"))
    monkeypatch.setattr(cpu, "SOURCES", sources)
    monkeypatch.setenv("EXL3KIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("EXL3KIT_CPU_ISA", "EXL3KIT_CXX"):
        monkeypatch.delenv(name, raising=False)
    for cached in (cpu.cpu_library, cpu.cpu_isa):
        cached.cache_clear()
    yield sources
    for cached in (cpu.cpu_library, cpu.cpu_isa):
        cached.cache_clear()


def build() -> Path:
    compiler = env.cxx()
    assert compiler is not None
    return cpu.library_path(compiler)


def answer(path: Path) -> int:
    return ctypes.CDLL(str(path)).exl3_cpu_isa_max()


def test_second_use_compiles_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build()
    monkeypatch.setattr(cpu, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build() == first
    assert answer(first) == 1
    assert not list(first.parents[1].glob(".build-*")), "a temporary folder was left behind"
    assert not list(tiny.glob("*.o")), "objects belong into the cache folder"


def test_other_users_may_enter_as_elsewhere(tiny: Path) -> None:
    """A library built into an image by root is read by a user who cannot write there."""
    folder = build().parent
    (folder.parent / "plain").mkdir()
    assert folder.stat().st_mode == (folder.parent / "plain").stat().st_mode


def test_changed_source_is_another_entry(tiny: Path) -> None:
    first = build()
    (tiny / "one.cpp").write_text(GOOD.replace("ANSWER", "2"))
    second = build()
    assert (answer(first), answer(second)) == (1, 2)


def test_changed_header_is_another_entry(tiny: Path) -> None:
    (tiny / "value.h").write_text("#define VALUE 3\n")
    (tiny / "one.cpp").write_text('#include "value.h"\n' + GOOD.replace("ANSWER", "VALUE"))
    assert answer(build()) == 3
    (tiny / "value.h").write_text("#define VALUE 4\n")
    assert answer(build()) == 4


@pytest.mark.parametrize(
    "damage", ["truncate", "flip", "no digest", "garbage digest", "empty folder"]
)
def test_damaged_entry_is_a_miss(tiny: Path, damage: str) -> None:
    path = build()
    data = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "no digest":
        (path.parent / cpu.DIGEST).unlink()
    elif damage == "garbage digest":
        (path.parent / cpu.DIGEST).write_bytes(b"\xff\xfe" * 32)
    else:
        for file in path.parent.iterdir():
            file.unlink()
    assert build() == path
    assert answer(path) == 1
    assert sorted(file.name for file in path.parent.iterdir()) == [cpu.LIBRARY, cpu.DIGEST]


NO_LIBRARY = b"no ELF file"


def test_entry_that_does_not_load_is_a_miss(tiny: Path) -> None:
    """Its digest is right, so only the loader can tell."""
    path = build()
    path.write_bytes(NO_LIBRARY)
    (path.parent / cpu.DIGEST).write_text(hashlib.sha256(NO_LIBRARY).hexdigest())
    library = cpu.cpu_library()
    assert library is not None and library.exl3_cpu_isa_max() == 1
    assert path.read_bytes() != NO_LIBRARY


def test_library_that_never_loads_is_one_clear_error(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_nothing(compiler: str, work: Path) -> None:
        (work / cpu.LIBRARY).write_bytes(NO_LIBRARY)

    monkeypatch.setattr(cpu, "_compile", compile_nothing)
    with pytest.raises(CompileError, match=r"libexl3kit_cpu\.so: .*loads, got .*EXL3KIT_CACHE_DIR"):
        cpu.cpu_library()


def test_two_processes_at_once(tiny: Path) -> None:
    code = (
        "import sys, pathlib, ctypes\n"
        "from exl3kit.jit import cpu\n"
        "cpu.SOURCES = pathlib.Path(sys.argv[1])\n"
        "print(cpu.cpu_library().exl3_cpu_isa_max())\n"
    )
    command = [sys.executable, "-c", code, str(tiny)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[0].strip() for process in started] == ["1"] * 3


def test_compile_failure_carries_the_compilers_words(tiny: Path) -> None:
    (tiny / "one.cpp").write_text("int broken( {\n")
    with pytest.raises(CompileError, match=r"one\.cpp.*error:"):
        build()
    assert not list((env.cache_dir() / "cpu").glob(".build-*"))


def test_no_compiler_is_none_with_one_warning(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(log, "_warned", set())
    for _ in range(2):
        cpu.cpu_library.cache_clear()
        assert cpu.cpu_library() is None
    assert cpu.cpu_isa() == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "EXL3KIT_CXX" in caplog.text


def test_unwritable_cache_names_the_variable(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL3KIT_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(CompileError, match="EXL3KIT_CACHE_DIR"):
        build()


@pytest.mark.parametrize(("request_", "expected"), [("auto", 1), ("portable", 0), ("avx2", 1)])
def test_isa_request(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, request_: str, expected: int
) -> None:
    monkeypatch.setenv("EXL3KIT_CPU_ISA", request_)
    assert cpu.cpu_isa() == expected


def test_isa_above_the_machine_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL3KIT_CPU_ISA", "avx512")
    with pytest.raises(UnsupportedError, match=r"'avx2'.*'avx512'"):
        cpu.cpu_isa()
