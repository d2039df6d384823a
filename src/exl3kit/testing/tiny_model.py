"""Random Glm4Moe checkpoints of a few megabytes, which stock vLLM loads without any download.

Every tensor draws from a generator seeded by its own name, so two models that differ in one option
agree in all other tensors. Values are representable in bfloat16: the same matrices serve fp32,
fp16 and bf16 runs.

With random weights a multi-token-prediction draft is practically never accepted. `agree=True`
shapes the weights so that draft and target compute almost the same function of the last token:
attention and MLP outputs are scaled by 0.02, so the residual stream stays close to the embedding,
and the draft's `eh_proj` selects the embedding half of its input.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SPECIAL_TOKENS = ("<|endoftext|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>")
BYTES = 256
VOCAB_SIZE = 320  # a multiple of 64, vLLM's padding of the vocabulary
CHAT_TEMPLATE = (
    "<|bos|>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_AGREE_SCALE = 0.02


@dataclass(frozen=True)
class TinyGlm4Moe:
    """Sizes and switches of one tiny model; the defaults give about 5 M parameters.

    `mtp_layers` next-token layers are named like decoder layers, from `num_layers` on.
    `mtp_own_head` also stores the copies of embedding and head that published files carry there.
    """

    hidden_size: int = 256
    intermediate_size: int = 512
    moe_intermediate_size: int = 256
    num_experts: int = 8
    top_k: int = 2
    num_layers: int = 3
    dense_layers: int = 1
    mtp_layers: int = 0
    mtp_own_head: bool = False
    agree: bool = False
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64


def tiny_config(spec: TinyGlm4Moe) -> dict[str, Any]:
    """The config.json of `spec` as a dict."""
    dtype = str(spec.dtype).removeprefix("torch.")
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "moe_intermediate_size": spec.moe_intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "first_k_dense_replace": spec.dense_layers,
        "num_nextn_predict_layers": spec.mtp_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "use_qk_norm": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        "n_routed_experts": spec.num_experts,
        "num_experts_per_tok": spec.top_k,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": BYTES + 1,
        "eos_token_id": BYTES,
        "pad_token_id": BYTES + SPECIAL_TOKENS.index("<|pad|>"),
        "dtype": dtype,
    }


class _Weights:
    """Collects the tensors of one model under their checkpoint names."""

    def __init__(self, spec: TinyGlm4Moe) -> None:
        self.spec = spec
        self.tensors: dict[str, torch.Tensor] = {}

    def draw(self, name: str, shape: tuple[int, ...], scale: float) -> torch.Tensor:
        seed = zlib.crc32(name.encode()) ^ self.spec.seed
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return (values * scale).bfloat16().float()

    def norm(self, name: str, size: int, *, unit: bool = False) -> None:
        weight = torch.ones(size) if unit else 1 + self.draw(name, (size,), 0.1)
        self.tensors[f"{name}.weight"] = weight.to(self.spec.dtype)

    def linear(self, name: str, out_features: int, in_features: int, scale: float = 1.5) -> None:
        if self.spec.agree and name.endswith((".o_proj", ".down_proj")):
            scale *= _AGREE_SCALE
        weight = self.draw(name, (out_features, in_features), scale / math.sqrt(in_features))
        self.tensors[f"{name}.weight"] = weight.to(self.spec.dtype)

    def mlp(self, prefix: str, width: int) -> None:
        hidden = self.spec.hidden_size
        self.linear(f"{prefix}.gate_proj", width, hidden)
        self.linear(f"{prefix}.up_proj", width, hidden)
        self.linear(f"{prefix}.down_proj", hidden, width)

    def attention(self, prefix: str) -> None:
        spec = self.spec
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.linear(f"{prefix}.q_proj", q_width, spec.hidden_size)
        self.linear(f"{prefix}.k_proj", kv_width, spec.hidden_size)
        self.linear(f"{prefix}.v_proj", kv_width, spec.hidden_size)
        self.linear(f"{prefix}.o_proj", spec.hidden_size, q_width)
        self.norm(f"{prefix}.q_norm", spec.head_dim)
        self.norm(f"{prefix}.k_norm", spec.head_dim)

    def moe(self, prefix: str) -> None:
        spec = self.spec
        self.linear(f"{prefix}.gate", spec.num_experts, spec.hidden_size)
        bias = f"{prefix}.gate.e_score_correction_bias"
        self.tensors[bias] = self.draw(bias, (spec.num_experts,), 0.05)  # stays fp32
        for expert in range(spec.num_experts):
            self.mlp(f"{prefix}.experts.{expert}", spec.moe_intermediate_size)
        self.mlp(f"{prefix}.shared_experts", spec.moe_intermediate_size)

    def decoder_layer(self, index: int) -> None:
        spec, prefix = self.spec, f"model.layers.{index}"
        self.norm(f"{prefix}.input_layernorm", spec.hidden_size)
        self.norm(f"{prefix}.post_attention_layernorm", spec.hidden_size)
        self.attention(f"{prefix}.self_attn")
        if index < spec.dense_layers:
            self.mlp(f"{prefix}.mlp", spec.intermediate_size)
        else:
            self.moe(f"{prefix}.mlp")

    def mtp_layer(self, index: int) -> None:
        spec, prefix = self.spec, f"model.layers.{index}"
        self.decoder_layer(index)
        self.norm(f"{prefix}.enorm", spec.hidden_size, unit=spec.agree)
        self.norm(f"{prefix}.hnorm", spec.hidden_size)
        self.norm(f"{prefix}.shared_head.norm", spec.hidden_size, unit=spec.agree)
        self.linear(f"{prefix}.eh_proj", spec.hidden_size, 2 * spec.hidden_size)
        if spec.agree:
            select = torch.eye(spec.hidden_size, 2 * spec.hidden_size)
            self.tensors[f"{prefix}.eh_proj.weight"] = select.to(spec.dtype)
        if spec.mtp_own_head:
            embedding, head = (
                self.tensors["model.embed_tokens.weight"],
                self.tensors["lm_head.weight"],
            )
            self.tensors[f"{prefix}.embed_tokens.weight"] = embedding.clone()
            self.tensors[f"{prefix}.shared_head.head.weight"] = head.clone()


def tiny_tensors(spec: TinyGlm4Moe) -> dict[str, torch.Tensor]:
    """All tensors of `spec` by checkpoint name; matrices are (out_features, in_features)."""
    weights = _Weights(spec)
    embedding = weights.draw("model.embed_tokens", (VOCAB_SIZE, spec.hidden_size), 1.0)
    weights.tensors["model.embed_tokens.weight"] = embedding.to(spec.dtype)
    weights.linear("lm_head", VOCAB_SIZE, spec.hidden_size, scale=5.0)
    weights.norm("model.norm", spec.hidden_size, unit=spec.agree)
    for index in range(spec.num_layers):
        weights.decoder_layer(index)
    for index in range(spec.num_layers, spec.num_layers + spec.mtp_layers):
        weights.mtp_layer(index)
    return weights.tensors


def write_tokenizer(path: Path) -> None:
    """Write a byte-level tokenizer with a chat template into the folder `path`.

    Token i < 256 is byte i; `SPECIAL_TOKENS` follow, and unused names fill up `VOCAB_SIZE`.
    """
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(),
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {_byte_symbol(value): value for value in range(BYTES)},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "bos_token": "<|bos|>",
        "pad_token": "<|pad|>",
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"eos_token_id": BYTES, "bos_token_id": BYTES + 1}
    _write_json(path / "tokenizer.json", tokenizer)
    _write_json(path / "tokenizer_config.json", settings)
    _write_json(path / "generation_config.json", generation)


def _added_tokens() -> list[dict[str, Any]]:
    spare = [f"<|unused_{i}|>" for i in range(VOCAB_SIZE - BYTES - len(SPECIAL_TOKENS))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": BYTES + i, "content": content, "special": True, **flags}
        for i, content in enumerate([*SPECIAL_TOKENS, *spare])
    ]


def _byte_symbol(value: int) -> str:
    """The printable character that byte-level tokenizers use for one byte.

    Printable Latin-1 bytes stand for themselves; the other 68 take the code points from 256 on,
    in byte order.
    """

    def is_printable(byte: int) -> bool:
        return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF

    if is_printable(value):
        return chr(value)
    return chr(0x100 + sum(not is_printable(byte) for byte in range(value)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def write_tiny_model(path: Path, spec: TinyGlm4Moe) -> Path:
    """Write `spec` as a checkpoint folder (config, one shard, tokenizer) and return `path`."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = tiny_tensors(spec)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    _write_json(path / "config.json", tiny_config(spec))
    write_tokenizer(path)
    return path
