"""Loading and launching against a driver that only records: types, sizes, limits, no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exl3kit.errors import CompileError
from exl3kit.jit import cache, launch, toolkit
from exl3kit.jit.compiler import Compiled, Resources
from exl3kit.jit.spec import KernelSpec, Param

SPEC = KernelSpec(
    "a.cuh", "exl3::f", (3,), (Param.POINTER, Param.INT32, Param.INT64, Param.FLOAT32)
)


class Recorder:
    """Stands for cuda.core and cuda.bindings.driver."""

    LEGACY_DEFAULT_STREAM = "legacy"

    def __init__(self, sizes: list[int]) -> None:
        self.arguments_info = [SimpleNamespace(size=size) for size in sizes]
        self.handle = 7
        self.launched: list[tuple[Any, ...]] = []
        self.limits: list[int] = []
        self.device = 0  # the current one
        self.threads: set[int] = set()  # that have a context
        self.Device = lambda index: SimpleNamespace(set_current=lambda: self.switch(index))
        self.ObjectCode = SimpleNamespace(from_cubin=lambda cubin, name: self)
        self.Stream = SimpleNamespace(from_handle=lambda handle: f"stream {handle}")
        self.LaunchConfig = dict
        self.CUkernel = int
        attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
        self.CUfunction_attribute = attribute

    def get_kernel(self, symbol: str) -> Recorder:
        return self

    def switch(self, index: int) -> None:
        self.device = index
        self.threads.add(threading.get_ident())

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        """torch.cuda.device."""
        before, self.device = self.device, index
        yield
        self.device = before

    def launch(self, *arguments: Any) -> None:
        assert threading.get_ident() in self.threads, "CUDA_ERROR_INVALID_CONTEXT"
        self.launched.append((*arguments, self.device))

    def cuKernelSetAttribute(self, _: Any, value: int, *__: Any) -> tuple[int]:
        self.limits.append(value)
        return (0,)


def load(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], stream: int = 0, index: int = 0
) -> tuple[launch.LoadedKernel, Recorder]:
    """A kernel on device `index` whose parameters take `sizes` bytes, and what launches it."""
    recorder = Recorder(sizes)
    compiled = Compiled(b"", "f", Resources(32, 1024, 0, 0, 0))
    monkeypatch.setattr(cache, "load_or_compile", lambda spec, arch: compiled)
    monkeypatch.setattr(toolkit, "cuda_module", lambda name: recorder)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    current = SimpleNamespace(cuda_stream=stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current)
    monkeypatch.setattr(torch.cuda, "device", recorder.on)
    _forget_all()
    return launch.get_kernel(SPEC, torch.device("cuda", index)), recorder


def _forget_all() -> None:
    for cached in (launch._load, launch._stream, launch._config):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """No recorded kernel, stream or configuration outlives a test."""
    yield
    _forget_all()


def test_arguments_have_the_types_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, recorder = load(monkeypatch, [8, 4, 8, 4], stream=99)
    tensor = torch.zeros(4)
    kernel.launch(2, 32, (tensor[1:], -1, 1 << 40, 0.5))
    ((stream, config, started, pointer, *numbers, _),) = recorder.launched
    assert (stream, started, pointer) == ("stream 99", recorder, tensor.data_ptr() + 4)
    assert [type(number) for number in numbers] == [ctypes.c_int32, ctypes.c_int64, ctypes.c_float]
    assert [number.value for number in numbers] == [-1, 1 << 40, 0.5]
    assert config["grid"] == 2 and config["block"] == 32
    kernel.launch(2, 32, (None, 0, 0, 0))
    assert recorder.launched[1][3] == 0


def test_default_stream_is_the_legacy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, recorder = load(monkeypatch, [8, 4, 8, 4])
    kernel.launch(1, 32, (None, 0, 0, 0))
    assert recorder.launched[0][0] == "legacy"


def test_a_device_that_is_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default stream belongs to the current device, which loading and launching give back."""
    kernel, recorder = load(monkeypatch, [8, 4, 8, 4], index=1)
    assert recorder.device == 0
    kernel.launch(1, 32, (None, 0, 0, 0))
    assert recorder.launched[0][-1] == 1
    assert recorder.device == 0


def test_a_thread_that_has_no_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, recorder = load(monkeypatch, [8, 4, 8, 4], index=1)
    thread = threading.Thread(target=kernel.launch, args=(1, 32, (None, 0, 0, 0)))
    thread.start()
    thread.join()
    assert len(recorder.launched) == 1
    assert recorder.device == 0


def test_clusters_are_counted_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, recorder = load(monkeypatch, [8, 4, 8, 4])
    kernel.launch((8, 6), 32, (None, 0, 0, 0), cluster=(2, 1))
    assert recorder.launched[0][1]["grid"] == (4, 6, 1)


def test_more_than_48_kib_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Static shared memory counts too: 1 KiB here."""
    kernel, recorder = load(monkeypatch, [8, 4, 8, 4])
    for shared in (47 * 1024, 48 * 1024, 40 * 1024, 64 * 1024, 64 * 1024):
        kernel.launch(1, 32, (None, 0, 0, 0), shared_bytes=shared)
    assert recorder.limits == [48 * 1024, 64 * 1024]


def test_another_signature_is_refused_when_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match=r"exl3::f<3>.*take \[8, 4, 8, 4\] bytes.*\[8, 8\]"):
        load(monkeypatch, [8, 8])


@pytest.mark.parametrize(
    "arguments", [(0x1000, 0, 0, 0.0), (None, torch.zeros(1), 0, 0.0), (None, None, 0, 0.0)]
)
def test_wrong_kinds_of_argument_are_refused(
    arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, _ = load(monkeypatch, [8, 4, 8, 4])
    with pytest.raises(TypeError, match="kernel argument: expected a"):
        kernel.launch(1, 32, arguments)
    with pytest.raises(ValueError, match="shorter"):
        kernel.launch(1, 32, (None, 0, 0))
