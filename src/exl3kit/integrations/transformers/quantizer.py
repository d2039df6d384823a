"""The object that transformers asks while it loads and saves an EXL3 checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from exl3kit.checkpoint.manifest import BLOCK_KEY
from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.checkpoint.r7 import BLOCK_KEY as R7_KEY
from exl3kit.errors import UnsupportedError
from exl3kit.integrations.transformers import compat
from exl3kit.integrations.transformers.config import Exl3Config
from exl3kit.integrations.transformers.experts import Exl3Experts
from exl3kit.integrations.transformers.linear import Exl3Linear
from exl3kit.integrations.transformers.replace import (
    check_checkpoint,
    replace_modules,
    without_mtp,
)
from exl3kit.models.decoder import DecoderMap
from exl3kit.models.registry import model_map
from exl3kit.runtime.checks import ACTIVATION_DTYPES


class Exl3Quantizer(compat.HfQuantizer):
    """Loads what exl3kit or exllamav3 quantised; it neither quantises nor trains."""

    quantization_config: Exl3Config
    checkpoint: Checkpoint
    map: DecoderMap

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """UnsupportedError for a model that is not quantised yet."""
        if not self.pre_quantized:
            raise UnsupportedError(
                "EXL3: from_pretrained cannot quantise; write a checkpoint with `exl3kit quantize` "
                "and open that"
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of activations and plain weights: float32, float16 or bfloat16."""
        if dtype not in ACTIVATION_DTYPES:
            allowed = ", ".join(map(str, ACTIVATION_DTYPES))
            raise UnsupportedError(f"dtype: expected one of {allowed}, got {dtype}")
        return dtype

    def _process_model_before_weight_loading(
        self, model: compat.PreTrainedModel, **kwargs: Any
    ) -> None:
        files = kwargs.get("checkpoint_files")
        if not files:
            raise UnsupportedError(
                "EXL3: from_pretrained needs a folder or hub name; modules are built from the "
                "headers of its files"
            )
        opened = open_checkpoint(Path(files[0]).parent)
        full = model_map(opened.config)
        self.checkpoint, self.map = without_mtp(opened, full)
        check_checkpoint(self.checkpoint, self.map)
        if len(self.map.moe_layers) and opened.config.get("hidden_act", "silu") != "silu":
            raise UnsupportedError(
                f"hidden_act: expected 'silu', got {opened.config['hidden_act']!r}"
            )
        base = model.base_model_prefix
        replace_modules(model, "" if hasattr(model, base) else f"{base}.", self.checkpoint)
        if self.checkpoint.is_exl3("lm_head"):
            compat.untie_head(model)
        compat.ignore_unexpected(model, [rf"\.layers\.{layer}\." for layer in full.mtp_layers])
        self._describe(model.config)

    def _describe(self, config: Any) -> None:
        """Say what was loaded, for `save_pretrained`: no next-token layers."""
        if getattr(config, "num_nextn_predict_layers", None):
            config.num_nextn_predict_layers = 0
        if self.checkpoint.manifest is not None:
            setattr(config, BLOCK_KEY, self.checkpoint.manifest.to_config())
        if self.checkpoint.r7 is not None:
            self.quantization_config.keys[R7_KEY] = self.checkpoint.r7.to_config()

    def _process_model_after_weight_loading(
        self, model: compat.PreTrainedModel, **kwargs: Any
    ) -> compat.PreTrainedModel:
        for name, module in model.named_modules():
            if not isinstance(module, Exl3Linear | Exl3Experts):
                continue
            if any(buffer.is_meta for buffer in module.buffers()):
                raise UnsupportedError(
                    f"module {name!r}: EXL3 weights cannot be offloaded; choose a device_map that "
                    "keeps every module in memory"
                )
            if isinstance(module, Exl3Linear):
                module.finish(name)
            else:
                module.finish(self.map.moe_intermediate_size)
        return model

    # The base class leaves these two without a return type, which reads as None.
    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """True; UnsupportedError where a file would be missing from what transformers writes."""
        manifest = self.checkpoint.manifest
        if manifest is not None and manifest.is_mixed:
            raise UnsupportedError(
                f"save_pretrained: the rates of these experts are in {manifest.bits_per_expert}, "
                f"a file that transformers does not write; copy {self.checkpoint.path} instead"
            )
        return True

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """False: the operations have no gradient."""
        return False
