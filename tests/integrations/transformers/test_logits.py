"""Logits and greedy tokens of an EXL3 model equal those of the dense model it decodes to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3kit.integrations.transformers.experts import Exl3Experts
from exl3kit.integrations.transformers.linear import Exl3Linear
from exl3kit.slicing.job import slice_checkpoint
from exl3kit.slicing.plan import SliceOptions
from exl3kit.testing.checkpoints import OrdinaryOptions, write_r7
from exl3kit.testing.dense import write_dense_twin
from exl3kit.testing.tiny_configs import MODEL_TYPES, MOE_TYPES, MTP_TYPES, tiny_config_of
from tests.integrations.transformers.conftest import Agreement, agreement, load, logits, tokens

MIN_COSINE = 0.99999
# Of the largest logit. Measured on all cases here: at most 2e-6; a wrong scale or a lost expert is
# off by more than 1e-2.
MAX_DIFFERENCE = 3e-5


def check_equal(checkpoint: Path, record: Callable[[str, object], None], model: Any = None) -> None:
    """Float32 logits and 12 greedy tokens of `checkpoint` against its dense twin."""
    model = load(checkpoint) if model is None else model
    twin = load(write_dense_twin(checkpoint, checkpoint.parent / "twin"))
    expected = logits(twin, tokens())
    found, bound = (
        agreement(logits(model, tokens()), expected),
        MAX_DIFFERENCE * expected.abs().max(),
    )
    for name in Agreement.__annotations__:
        record(name, getattr(found, name))
    assert found.cosine > MIN_COSINE and found.max_abs < bound and found.top1 == 1.0, found
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(tokens(), **options), twin.generate(tokens(), **options))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_ordinary(
    model_type: str, ordinary: Callable[..., Path], record_property: Callable[[str, object], None]
) -> None:
    mtp = 1 if model_type in MTP_TYPES else 0
    checkpoint = ordinary(model_type, mtp_layers=mtp)
    model = load(checkpoint)
    kinds = {type(module) for module in model.modules()}
    assert Exl3Linear in kinds and isinstance(model.lm_head, Exl3Linear)
    assert (Exl3Experts in kinds) == (model_type in MOE_TYPES)
    assert not any(name.endswith("_proj.weight") for name, _ in model.named_parameters()) or (
        "indexer" in str(model)  # two of its projections are stored dense
    )
    check_equal(checkpoint, record_property, model)


@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_rank_sliced(
    model_type: str, sliced: Callable[..., Path], record_property: Callable[[str, object], None]
) -> None:
    mtp = 1 if model_type in MTP_TYPES else 0
    first = 0 if model_type == "qwen3_moe" else 1
    check_equal(sliced(model_type, 3, 2, (first, 1 + mtp), mtp_layers=mtp), record_property)


# A file of tp 1 has names with ranks but nothing to expand; every rate of a layer makes a tier.
@pytest.mark.parametrize(
    "bits, tp, rotation_layout",
    [
        (4, 1, "per_expert_v1"),
        (4, 4, "shared_h_v1"),
        ((2, 3, 2, 5), 2, "shared_h_v1"),
        ((2, 3, 6, 5), 4, "per_expert_v1"),
    ],
)
def test_rank_sliced_layouts(
    bits: Any,
    tp: int,
    rotation_layout: str,
    sliced: Callable[..., Path],
    record_property: Callable[[str, object], None],
) -> None:
    checkpoint = sliced("glm4_moe", bits, tp, (1, 1), rotation_layout=rotation_layout)
    check_equal(checkpoint, record_property)


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
def test_codebooks(
    codebook: str, ordinary: Callable[..., Path], record_property: Callable[[str, object], None]
) -> None:
    options = OrdinaryOptions(bits=2, codebook=codebook, head_bits=8)
    check_equal(ordinary("qwen3_moe", options), record_property)


def test_half_integer_bits(
    ordinary: Callable[..., Path], record_property: Callable[[str, object], None]
) -> None:
    check_equal(ordinary("deepseek_v3", OrdinaryOptions(bits=2.5)), record_property)


def test_r7(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Shared vectors, and a rate of its own for every projection, gate and up included."""
    keys = {"hidden_size": 128, "moe_intermediate_size": 128}
    config = {**tiny_config_of("glm4_moe", num_experts=3, mtp_layers=1), **keys}
    check_equal(write_r7(tmp_path / "r7", config, (3, 4, 5, 3)), record_property)


def test_packed_signs(
    ordinary: Callable[..., Path], record_property: Callable[[str, object], None]
) -> None:
    """As exllamav3's first versions wrote them."""
    check_equal(ordinary("qwen3_moe", OrdinaryOptions(has_packed_signs=True)), record_property)


def test_widths_that_are_padded(
    ordinary: Callable[..., Path], record_property: Callable[[str, object], None]
) -> None:
    """No width of this model is a multiple of 128, the vocabulary included."""
    keys = {"hidden_size": 144, "intermediate_size": 200, "moe_intermediate_size": 96}
    keys |= {"head_dim": 40, "vocab_size": 320}
    check_equal(ordinary("qwen3_moe", **keys), record_property)


def test_rank_sliced_width_that_is_padded(
    ordinary: Callable[..., Path], record_property: Callable[[str, object], None]
) -> None:
    """192 channels are stored as 256: the first slice is full, half of the second is padding."""
    options = OrdinaryOptions(codebook="mcg", head_bits=None)
    whole = ordinary("qwen3_moe", options, moe_intermediate_size=192)
    sliced = whole.parent / "sliced"
    slice_checkpoint(whole, sliced, SliceOptions(tp=2))
    check_equal(sliced, record_property)


def test_mlp_in_slices(
    ordinary: Callable[..., Path], record_property: Callable[[str, object], None]
) -> None:
    options = OrdinaryOptions(slice_width=128)
    check_equal(ordinary("llama", options, intermediate_size=300), record_property)


def test_biases(
    ordinary: Callable[..., Path], record_property: Callable[[str, object], None]
) -> None:
    check_equal(ordinary("llama", attention_bias=True, mlp_bias=True), record_property)


def test_indexer_that_drops_tokens(
    ordinary: Callable[..., Path], record_property: Callable[[str, object], None]
) -> None:
    check_equal(ordinary("glm_moe_dsa", index_topk=8), record_property)
