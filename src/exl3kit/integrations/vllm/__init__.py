"""The vLLM plugin: EXL3 checkpoints in stock vLLM, through its documented registrations only.

vLLM calls `register` in every process (entry point group `vllm.general_plugins`). From then on

    compat -> facts -> config -> moe | linear | head -> params   layers and their parameters
    loader                                                       which tensors a rank reads

`facts` reads what a checkpoint holds, `config` answers per layer, `loader` filters the tensor
stream. Nothing of vLLM is patched.
"""

from __future__ import annotations

LOAD_FORMATS = ("auto", "hf", "safetensors", "exl3")


def register() -> None:
    """Register quantization `exl3`, the loader and the torch ops; a second call changes nothing."""
    import exl3kit.runtime.ops  # noqa: F401  registers the torch ops
    from exl3kit.integrations.vllm import compat
    from exl3kit.integrations.vllm.config import Exl3Config
    from exl3kit.integrations.vllm.loader import Exl3Loader, is_registered

    if is_registered():
        return
    compat.register_quantization_config("exl3")(Exl3Config)
    for load_format in LOAD_FORMATS:
        compat.register_model_loader(load_format)(Exl3Loader)
