"""Loaded CUDA kernels: typed arguments, torch's current stream, dynamic shared memory, clusters.

    kernel = get_kernel(spec, tensor.device)
    kernel.launch(grid, block, (out, x, rows), shared_bytes=...)

A launch allocates nothing on the device, reads nothing back and does not synchronise, so it can be
captured in a CUDA graph. Arguments are not checked against what the kernel does with them: shapes,
dtypes and devices are the caller's to check, once, where it plans.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import torch

from exl3kit.errors import CompileError, MissingKernelError
from exl3kit.jit import cache, toolkit
from exl3kit.jit.spec import KernelSpec, Param, arch_of

Dim = int | tuple[int, ...]
Argument = torch.Tensor | int | float | None
_NUMBERS: dict[Param, Any] = {
    Param.INT32: ctypes.c_int32,
    Param.INT64: ctypes.c_int64,
    Param.FLOAT32: ctypes.c_float,
}
_STATIC_LIMIT = 48 * 1024  # shared bytes a block gets without asking


def get_kernel(spec: KernelSpec, device: torch.device) -> LoadedKernel:
    """The kernel of `spec` on a CUDA `device`, compiled if need be; cached in the process."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _load(spec, index)


@functools.cache
def _load(spec: KernelSpec, index: int) -> LoadedKernel:
    with torch.cuda.device(index):  # cuda-core makes the device current and leaves it so
        return LoadedKernel(spec, index)


class LoadedKernel:
    """One kernel on one device."""

    def __init__(self, spec: KernelSpec, index: int) -> None:
        """Raises CompileError, UnsupportedError for an old device, MissingKernelError.

        Device `index` is the current one. A kernel can not be loaded while a CUDA graph is
        captured: MissingKernelError says so.
        """
        if torch.cuda.is_current_stream_capturing():
            raise MissingKernelError(
                f"{spec}: expected to be loaded before a CUDA graph is captured; "
                "run the layer once before, with as many tokens"
            )
        capability = torch.cuda.get_device_capability(index)
        arch = arch_of(capability)
        compiled = cache.load_or_compile(spec, arch)
        torch.cuda.current_stream(index)  # torch makes the device's primary context
        core = toolkit.cuda_module("cuda.core")
        core.Device(index).set_current()
        code = core.ObjectCode.from_cubin(compiled.cubin, name=spec.expression)
        self.spec = spec
        self.resources = compiled.resources
        self._index = index
        self._can_overlap = capability >= (9, 0)
        self._start = core.launch
        self._code = code  # the kernel lives as long as its library
        self._kernel = code.get_kernel(compiled.symbol)
        self._dynamic_limit = _STATIC_LIMIT - compiled.resources.shared_bytes
        self._check_signature()

    def _check_signature(self) -> None:
        sizes = [info.size for info in self._kernel.arguments_info]
        expected = [param.size for param in self.spec.parameters]
        if sizes != expected:
            raise CompileError(
                f"{self.spec}: parameters of the spec take {expected} bytes, the kernel's {sizes}"
            )

    def launch(
        self,
        grid: Dim,
        block: Dim,
        arguments: tuple[Argument, ...],
        shared_bytes: int = 0,
        cluster: Dim | None = None,
        overlaps: bool = False,
    ) -> None:
        """Start the kernel on torch's current stream of its device, current or not.

        grid          blocks, (x,), (x, y) or (x, y, z); always in blocks, also with a cluster
        block         threads
        arguments     one a parameter: a tensor (its address) or None for a pointer, else a number
        shared_bytes  dynamic shared memory of a block
        cluster       blocks of a cluster (capability 9.0 and newer)
        overlaps      start while the kernel before it in the stream still runs; for kernels that
                      wait for it by themselves (griddepcontrol); no effect below capability 9.0
        """
        if shared_bytes > self._dynamic_limit:
            self._raise_limit(shared_bytes)
        packed = [
            _pack(param, value)
            for param, value in zip(self.spec.parameters, arguments, strict=True)
        ]
        stream = _stream(torch.cuda.current_stream(self._index).cuda_stream)
        config = _config(grid, block, shared_bytes, cluster, overlaps and self._can_overlap)
        with torch.cuda.device(self._index):  # the default stream is the current device's
            _bind_thread(self._index)
            self._start(stream, config, self._kernel, *packed)

    def _raise_limit(self, shared_bytes: int) -> None:
        driver = toolkit.cuda_module("cuda.bindings.driver")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        handle = driver.CUkernel(int(self._kernel.handle))
        (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, handle, self._index)
        if int(status):
            raise CompileError(
                f"{self.spec}: {shared_bytes} bytes of dynamic shared memory refused: {status.name}"
            )
        self._dynamic_limit = shared_bytes


_thread = threading.local()


def _bind_thread(index: int) -> None:
    """Give this thread a context, which the driver does not do by itself.

    torch leaves it to the first call of the CUDA runtime, and a thread may launch before any. From
    then on torch's choice of a device moves the context along.
    """
    if not getattr(_thread, "is_bound", False):
        toolkit.cuda_module("cuda.core").Device(index).set_current()
        _thread.is_bound = True


def _pack(param: Param, value: Argument) -> Any:
    """What cuda-core takes for one parameter: it passes a plain int as an address."""
    if param is Param.POINTER:
        if value is None:
            return 0
        if isinstance(value, torch.Tensor):
            return value.data_ptr()
    elif isinstance(value, int | float):
        return _NUMBERS[param](value)
    raise TypeError(f"kernel argument: expected a {param.value[0]}, got {type(value).__name__}")


@functools.cache
def _stream(handle: int) -> Any:
    core = toolkit.cuda_module("cuda.core")
    return core.Stream.from_handle(handle) if handle else core.LEGACY_DEFAULT_STREAM


@functools.lru_cache(maxsize=4096)
def _config(grid: Dim, block: Dim, shared_bytes: int, cluster: Dim | None, overlaps: bool) -> Any:
    core = toolkit.cuda_module("cuda.core")
    if cluster is not None:  # cuda-core counts clusters, not blocks
        grid = tuple(
            blocks // size for blocks, size in zip(_three(grid), _three(cluster), strict=True)
        )
    return core.LaunchConfig(
        grid=grid,
        cluster=cluster,
        block=block,
        shmem_size=shared_bytes,
        programmatic_stream_serialization=overlaps,
    )


def _three(dim: Dim) -> tuple[int, int, int]:
    sizes = (dim,) if isinstance(dim, int) else dim
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z
