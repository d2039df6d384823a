"""The exception tree: every refusal is an `Exl3Error` and also the built-in it stands for.

A message names the thing, the property, what was expected, what was found, and what would work.
"""

from __future__ import annotations


class Exl3Error(Exception):
    """Base of every error exl3kit raises on purpose."""


class FormatError(Exl3Error, ValueError):
    """A tensor or its metadata is not valid EXL3."""


class CheckpointError(Exl3Error, ValueError):
    """A checkpoint folder, a file in it, or its config cannot be used as it is."""


class SliceError(Exl3Error, ValueError):
    """A cut that the format does not allow, or a parallel layout that does not fit the file."""


class UnsupportedError(Exl3Error, NotImplementedError):
    """Valid input that exl3kit does not handle; the message names the feature."""


class CompileError(Exl3Error, RuntimeError):
    """A kernel did not compile; the message carries the compiler's output."""


class MissingKernelError(Exl3Error, RuntimeError):
    """Compiling was forbidden and the cache lacks the kernel; the message names its spec."""
