"""`quantization=exl3` in vLLM: which method each layer gets.

One config object serves the target and its draft. It is built in the front-end process, completed
by `maybe_update_config` from the checkpoint's headers, and pickled to the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from exl3kit.checkpoint.manifest import find_block
from exl3kit.checkpoint.names import layer_index
from exl3kit.checkpoint.r7 import BLOCK_KEY as R7_KEY
from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.integrations.vllm import LOAD_FORMATS, compat
from exl3kit.integrations.vllm.facts import (
    CheckpointFacts,
    ModelSizes,
    check_missing,
    checkpoint_folder,
    read_facts,
)
from exl3kit.integrations.vllm.head import Exl3HeadMethod
from exl3kit.integrations.vllm.linear import DecodedLinearMethod, Exl3LinearMethod, LinearPart
from exl3kit.integrations.vllm.moe import Exl3MoEMethod
from exl3kit.jit.cpu import cpu_library
from exl3kit.log import get_logger, warn_once

METHOD = "exl3"

_logger = get_logger(__name__)


class Exl3Config(compat.QuantizationConfig):
    """vLLM's view of an EXL3 checkpoint; `facts` is None until vLLM names the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: CheckpointFacts | None = None

    # vLLM types names as a Literal of its built-in methods; registered ones are other strings.
    def get_name(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The method's name in `--quantization` and in `quant_method`."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """fp16, bf16, and fp32 for CPU runs that are compared exactly."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability 8.0."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Where an ordinary EXL3 checkpoint keeps its metadata when config.json has none."""
        return ["quantization_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exl3Config:
        """A config without facts; what the dict says is read again from the checkpoint itself."""
        return cls()

    @classmethod
    def override_quantization_method(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """`exl3` for a checkpoint that carries EXL3 experts behind another method's name.

        vLLM asks this before it looks at `quant_method`. A user who named another method gets no
        answer but one warning, since loading is going to fail later with less clear words.
        """
        if not _announces_exl3(hf_quant_cfg, hf_config):
            return None
        if user_quant in (None, METHOD):
            return METHOD
        warn_once(
            _logger,
            f"named {user_quant}",
            f"the checkpoint holds EXL3 experts but quantization={user_quant!r} was asked for; "
            f"leave it out or use quantization={METHOD!r}",
        )
        return None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the checkpoint's headers and build the kernels, both before any process starts.

        Here errors reach the user directly, and workers find the kernels in the cache instead of
        compiling them once each.

        vLLM keeps compiled graphs under a digest of the model's config, which tells nothing of the
        bits of each linear, while graphs hold offsets that follow from them: `exl3_layout` does.
        """
        sizes = ModelSizes.of(hf_config.get_text_config())
        folder = checkpoint_folder(model_name, revision)
        self.facts = read_facts(folder, sizes)
        check_missing(folder)
        hf_config.exl3_layout = self.facts.digest()
        if compat.device_type() == "cpu":
            cpu_library()

    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> compat.QuantizeMethodBase | None:
        """EXL3 where the checkpoint has trellis tensors for the layer, else vLLM's own method.

        UnsupportedError in an engine that cannot serve EXL3, see `_check_engine`.
        """
        facts = self.hydrated(prefix)
        _check_engine(prefix)
        if isinstance(layer, compat.ExpertsLayer):
            experts = facts.experts.get(layer_index(prefix))
            return experts and Exl3MoEMethod(layer.moe_config, experts, prefix)
        if isinstance(layer, compat.ParallelLMHead):
            spec = facts.linears.get(prefix)
            return spec and Exl3HeadMethod([LinearPart(prefix, spec)])
        if isinstance(layer, compat.LinearBase):
            parts = self._linear_parts(facts, prefix)
            if not parts:
                return compat.UnquantizedLinearMethod()
            is_absorbed = prefix.endswith(".kv_b_proj")
            return DecodedLinearMethod(parts) if is_absorbed else Exl3LinearMethod(parts)
        return None

    def hydrated(self, prefix: str) -> CheckpointFacts:
        """The facts; CheckpointError naming the asking layer if there are none."""
        if self.facts is None:
            raise CheckpointError(
                f"{prefix}: the EXL3 config never saw the checkpoint (maybe_update_config was not "
                "called), so this layer would silently become an unquantised one"
            )
        return self.facts

    def _linear_parts(self, facts: CheckpointFacts, prefix: str) -> list[LinearPart]:
        """The EXL3 matrices a (possibly fused) linear is made of; empty if it has none."""
        parent, dot, leaf = prefix.rpartition(".")
        names = [f"{parent}{dot}{part}" for part in self.packed_modules_mapping.get(leaf, [leaf])]
        specs = {name: facts.linears.get(name) for name in names}
        found = [LinearPart(name, spec) for name, spec in specs.items() if spec is not None]
        if found and len(found) != len(names):
            plain = [name for name, spec in specs.items() if spec is None]
            raise CheckpointError(
                f"{prefix}: vLLM fuses {', '.join(names)}, so all must be EXL3 or none; "
                f"without a trellis: {', '.join(plain)}"
            )
        return found


def _check_engine(prefix: str) -> None:
    """No LoRA, which vLLM adds to layers with a `weight`; no loader that knows nothing of ranks."""
    if compat.has_lora():
        raise UnsupportedError(
            f"{prefix}: LoRA adapters are not supported with EXL3 checkpoints; start without "
            "--enable-lora, or merge the adapter into the model before quantising it"
        )
    if (load_format := compat.load_format()) not in LOAD_FORMATS:
        raise UnsupportedError(
            f"load format: expected one of {', '.join(LOAD_FORMATS)} for an EXL3 checkpoint, got "
            f"{load_format!r}; leave --load-format out"
        )


def _announces_exl3(hf_quant_cfg: Mapping[str, Any], hf_config: Any) -> bool:
    """True for a rank-sliced file or the streamed R7 dialect, whose quant_method is a shim."""
    if isinstance(hf_quant_cfg.get(R7_KEY), Mapping):
        return True
    return hf_config is not None and find_block(hf_config.to_dict()) is not None
