"""EXL3 linears without an engine: fused sources, tensor-parallel cuts, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exl3kit.errors import CheckpointError, FormatError, SliceError
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.integrations.vllm.linear import DecodedLinearMethod, Exl3LinearMethod, LinearPart
from exl3kit.integrations.vllm.params import MatrixSpec
from exl3kit.testing.generate import random_exl3

ATTENTION = "model.layers.0.self_attn"


def part(tensor: Exl3Tensor) -> LinearPart:
    spec = MatrixSpec(tensor.in_features, tensor.out_features, tensor.bits, tensor.codebook)
    return LinearPart(tensor.name, spec)


def build(
    sources: list[Exl3Tensor],
    in_size: int,
    out_sizes: list[int],
    tp: tuple[int, int] = (1, 0),
    method_type: type[Exl3LinearMethod] = Exl3LinearMethod,
) -> tuple[Exl3LinearMethod, Any]:
    layer = torch.nn.Module()
    layer.tp_size, layer.tp_rank = tp  # type: ignore[assignment]
    method = method_type([part(source) for source in sources])
    method.create_weights(layer, in_size, out_sizes, in_size, sum(out_sizes), torch.float32)
    return method, layer


def load(layer: Any, sources: list[Exl3Tensor], shards: list[str | int | None]) -> None:
    for source, shard in zip(sources, shards, strict=True):
        for field, tensor in source.tensors().items():
            param = getattr(layer, field)
            arguments = (param, tensor) if shard is None else (param, tensor, shard)
            param.weight_loader(*arguments)


def qkv(bits: tuple[int, int, int] = (3, 4, 3), codebook: str = "mcg") -> list[Exl3Tensor]:
    sizes = {"q_proj": 512, "k_proj": 128, "v_proj": 128}
    return [
        random_exl3(256, size, bits[i], codebook, seed=i, name=f"{ATTENTION}.{name}")
        for i, (name, size) in enumerate(sizes.items())
    ]


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
def test_fused_sources_keep_their_own_bits(codebook: str) -> None:
    sources = qkv(codebook=codebook)
    method, layer = build(sources, 256, [512, 128, 128])
    load(layer, sources, ["q", "k", "v"])
    method.process_weights_after_loading(layer)
    x, bias = torch.randn(2, 3, 256), torch.randn(768)
    expected = torch.cat([x @ source.dequantize() for source in sources], dim=-1) + bias
    torch.testing.assert_close(method.apply(layer, x, bias), expected, atol=1e-4, rtol=1e-4)


def test_sizes_that_the_file_filled_up_to_128() -> None:
    """Latent attention: 128 outputs of the query beside 512 + 64 that are stored as 640."""
    sources = [
        random_exl3(384, size, 3, seed=size, name=f"{ATTENTION}.{name}")
        for name, size in (("q_a_proj", 128), ("kv_a_proj_with_mqa", 640))
    ]
    method, layer = build(sources, 320, [128, 576])
    load(layer, sources, [0, 1])
    method.process_weights_after_loading(layer)
    x = torch.randn(5, 320)
    weights = [source.dequantize()[:320] for source in sources]
    expected = torch.cat([x @ weights[0], x @ weights[1][:, :576]], dim=-1)
    torch.testing.assert_close(method.apply(layer, x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_linear_that_vllm_takes_apart_is_decoded(rank: int) -> None:
    """kv_b_proj at TP 2: `weight` is what stock vLLM has, and nothing packed is left."""
    source = random_exl3(128, 512, 4, name=f"{ATTENTION}.kv_b_proj")
    method, layer = build([source], 128, [256], (2, rank), DecodedLinearMethod)
    load(layer, [source], [None])
    method.process_weights_after_loading(layer)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    expected = source.dequantize().T[256 * rank : 256 * rank + 256]
    torch.testing.assert_close(layer.weight.data, expected, atol=0, rtol=0)
    x = torch.randn(3, 128)
    torch.testing.assert_close(method.apply(layer, x), x @ expected.T)


def test_input_views_are_accepted() -> None:
    sources = [random_exl3(256, 128, 3, name=f"{ATTENTION}.o_proj")]
    method, layer = build(sources, 256, [128])
    load(layer, sources, [None])
    x = torch.randn(4, 512)[:, ::2]
    expected = x @ sources[0].dequantize()
    torch.testing.assert_close(method.apply(layer, x), expected, atol=1e-4, rtol=1e-4)


def test_column_cut_with_replicated_key_value_heads() -> None:
    """At TP 4 each rank has 128 of 512 query channels, and all ranks share the one k and v part."""
    sources, x = qkv(), torch.randn(5, 256)
    for rank in range(4):
        method, layer = build(sources, 256, [128, 128, 128], (4, rank))
        load(layer, sources, ["q", "k", "v"])
        q, k, v = (source.dequantize() for source in sources)
        q = q[:, 128 * rank : 128 * rank + 128]
        expected = torch.cat([x @ q, x @ k, x @ v], dim=-1)
        torch.testing.assert_close(method.apply(layer, x), expected, atol=1e-4, rtol=1e-4)


def test_row_cuts_add_up() -> None:
    source = random_exl3(256, 128, 4, name=f"{ATTENTION}.o_proj")
    x, total = torch.randn(5, 256), torch.zeros(5, 128)
    for rank in range(2):
        method, layer = build([source], 128, [128], (2, rank))
        load(layer, [source], [None])
        total += method.apply(layer, x[:, 128 * rank : 128 * rank + 128])
    torch.testing.assert_close(total, x @ source.dequantize(), atol=1e-4, rtol=1e-4)


def test_cut_inside_a_block_lists_the_sizes_that_work() -> None:
    source = random_exl3(128, 384, 3, name="model.layers.0.mlp.up_proj")
    with pytest.raises(SliceError, match=r"up_proj output: 384 .* 192 .*work: 1, 3"):
        build([source], 128, [192], (2, 0))


def test_sizes_of_another_model_are_refused() -> None:
    source = random_exl3(128, 256, 3, name="model.layers.0.mlp.up_proj")
    with pytest.raises(CheckpointError, match="up_proj output: stored size is 256"):
        build([source], 128, [384])


def test_missing_tensors_are_named() -> None:
    sources = qkv()
    method, layer = build(sources, 256, [512, 128, 128])
    load(layer, [sources[0], sources[2]], ["q", "v"])
    with pytest.raises(CheckpointError, match="4 tensors are missing") as error:
        method.process_weights_after_loading(layer)
    assert f"{ATTENTION}.k_proj.mcg" in str(error.value)


def test_wrong_tensors_are_refused() -> None:
    sources = qkv()
    _, layer = build(sources, 256, [512, 128, 128])
    with pytest.raises(CheckpointError, match=r"k_proj\.suh.*float16 \[256\].*\[128\]"):
        layer.suh.weight_loader(layer.suh, torch.zeros(128, dtype=torch.float16), "k")
    with pytest.raises(FormatError, match=r"k_proj\.mcg.*0x00000007"):
        layer.mcg.weight_loader(layer.mcg, torch.tensor(7, dtype=torch.int32), "k")


def test_sources_of_different_codebooks_are_refused() -> None:
    sources = [*qkv()[:2], *qkv(codebook="mul1")[2:]]
    with pytest.raises(CheckpointError, match="share a codebook"):
        build(sources, 256, [512, 128, 128])
