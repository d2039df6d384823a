"""`Exl3Tensor`: the tensors of one linear, validated together."""

from __future__ import annotations

import torch

from exl3kit.errors import FormatError
from exl3kit.format.decode import decode_dense
from exl3kit.format.spec import (
    HADAMARD_BLOCK,
    TILE,
    Codebook,
    bits_from_words,
    check_bits,
    marker_value,
)


def make_marker(codebook: Codebook) -> torch.Tensor | None:
    """The marker as it is written: int32, shape (); None for 3inst."""
    value = marker_value(codebook)
    return None if value is None else torch.tensor(value, dtype=torch.int32)


def check_marker(marker: torch.Tensor, codebook: Codebook, name: str) -> None:
    """One int32 element of the exact value (any shape), else FormatError with the value in hex."""
    expected = marker_value(codebook)
    assert expected is not None, "3inst has no marker"
    if marker.dtype != torch.int32 or marker.numel() != 1:
        raise FormatError(
            f"{name}: expected one int32 element, got {marker.dtype} {tuple(marker.shape)}"
        )
    found = int(marker.item())
    if found != expected:
        raise FormatError(
            f"{name}: expected marker value 0x{expected & 0xFFFFFFFF:08X}, "
            f"got 0x{found & 0xFFFFFFFF:08X}"
        )


def _check_vector(vector: torch.Tensor, length: int, name: str) -> None:
    if vector.dtype != torch.float16 or tuple(vector.shape) != (length,):
        raise FormatError(
            f"{name}: expected torch.float16 ({length},), got {vector.dtype} {tuple(vector.shape)}"
        )
    if not torch.isfinite(vector).all():
        bad = int((~torch.isfinite(vector)).nonzero()[0])
        raise FormatError(f"{name}: expected finite values, got {vector[bad].item()} at {bad}")


class Exl3Tensor:
    """One EXL3 linear: W = diag(suh) H_k What H_n diag(svh), y = x W (+ bias).

    trellis  int16 (in/16, out/16, 16 K), the packed tiles
    suh      float16 (in,), input-side signs and magnitudes
    svh      float16 (out,), output-side signs and magnitudes
    mcg      int32, one element 0xCBAC1FED, where the codebook is mcg
    mul1     int32, one element 0x83DCD12D, where the codebook is mul1; neither marker = 3inst
    bias     float16 (out,), optional; float32 is narrowed

    Sizes are the stored ones, multiples of 128. Tensors are kept as given, not copied.
    Raises FormatError, with `name` in front of the field, for anything the format does not allow.
    """

    def __init__(
        self,
        trellis: torch.Tensor,
        suh: torch.Tensor,
        svh: torch.Tensor,
        mcg: torch.Tensor | None = None,
        mul1: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        name: str = "",
    ) -> None:
        prefix = f"{name}." if name else ""
        if trellis.dtype != torch.int16 or trellis.dim() != 3:
            raise FormatError(
                f"{prefix}trellis: expected torch.int16 with 3 dimensions, "
                f"got {trellis.dtype} {tuple(trellis.shape)}"
            )
        if mcg is not None and mul1 is not None:
            raise FormatError(f"{prefix}mcg and {prefix}mul1: expected at most one codebook marker")
        self.name = name
        self.trellis, self.suh, self.svh = trellis, suh, svh
        self.in_features, self.out_features = (TILE * d for d in trellis.shape[:2])
        self.codebook = self._codebook_of(mcg, mul1, prefix)
        self.bits = self._bits_of(prefix)
        self._check_sizes(prefix)
        self.bias = self._checked_bias(bias, prefix)

    @staticmethod
    def _codebook_of(mcg: torch.Tensor | None, mul1: torch.Tensor | None, prefix: str) -> Codebook:
        for codebook, marker in ((Codebook.MCG, mcg), (Codebook.MUL1, mul1)):
            if marker is not None:
                check_marker(marker, codebook, f"{prefix}{codebook}")
                return codebook
        return Codebook.THREE_INST

    def _bits_of(self, prefix: str) -> int | float:
        try:
            return check_bits(bits_from_words(self.trellis.shape[2]), self.codebook)
        except FormatError as error:
            raise FormatError(f"{prefix}trellis: {error}") from None

    def _check_sizes(self, prefix: str) -> None:
        for side, size in (("in", self.in_features), ("out", self.out_features)):
            if size == 0 or size % HADAMARD_BLOCK:
                raise FormatError(
                    f"{prefix}trellis: expected {side}-features that are a multiple of "
                    f"{HADAMARD_BLOCK}, got {size} from shape {tuple(self.trellis.shape)}"
                )
        _check_vector(self.suh, self.in_features, f"{prefix}suh")
        _check_vector(self.svh, self.out_features, f"{prefix}svh")

    def _checked_bias(self, bias: torch.Tensor | None, prefix: str) -> torch.Tensor | None:
        if bias is None:
            return None
        if bias.dtype == torch.float32:
            bias = bias.to(torch.float16)
        _check_vector(bias, self.out_features, f"{prefix}bias")
        return bias

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dense matrix W, (in_features, out_features) in `dtype`; the bias is not in it."""
        return decode_dense(self.trellis, self.suh, self.svh, self.codebook, dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Field name -> tensor, as a checkpoint stores them (marker as int32 of shape ())."""
        fields = {"trellis": self.trellis, "suh": self.suh, "svh": self.svh}
        marker = make_marker(self.codebook)
        if marker is not None:
            fields[str(self.codebook)] = marker
        if self.bias is not None:
            fields["bias"] = self.bias
        return fields

    def __repr__(self) -> str:
        label = f"{self.name}: " if self.name else ""
        return (
            f"Exl3Tensor({label}in={self.in_features}, out={self.out_features}, "
            f"bits={self.bits}, codebook={self.codebook})"
        )
