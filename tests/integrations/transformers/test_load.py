"""What loading accepts, and what it refuses with the name of the tensor, module or key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from exl3kit.errors import CheckpointError, FormatError, UnsupportedError
from exl3kit.integrations.transformers import Exl3Config
from exl3kit.integrations.transformers.experts import Exl3Experts
from exl3kit.integrations.transformers.linear import Exl3Linear
from exl3kit.testing.checkpoints import OrdinaryOptions, write_plain
from exl3kit.testing.dense import write_dense_twin
from exl3kit.testing.generate import random_exl3
from exl3kit.testing.tiny_configs import tiny_config_of
from tests.integrations.transformers.conftest import agreement, load, logits, tokens

Tensors = dict[str, torch.Tensor]
GATE = "model.layers.1.mlp.experts.2.gate_proj"
Q_PROJ = "model.layers.0.self_attn.q_proj"


def edit_config(folder: Path, **keys: Any) -> Path:
    """Change keys of config.json; a value None removes the key."""
    config = {**json.loads((folder / "config.json").read_text()), **keys}
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """Change the tensors of a checkpoint; they are then all in one file."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    change(tensors)
    for file in [*files, *folder.glob("*.json")]:
        if file.name != "config.json":
            file.unlink()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, ordinary: Callable[..., Path]) -> None:
    """Scales stay fp16 and results are as near to float32 as those of the dense model are."""
    checkpoint = ordinary("glm4_moe")
    twin = write_dense_twin(checkpoint, checkpoint.parent / "twin")
    model, expected = load(checkpoint, dtype=dtype), logits(load(twin), tokens())
    assert model.dtype == dtype
    assert model.get_submodule(Q_PROJ).suh.dtype == torch.float16
    gap = 1 - agreement(logits(model, tokens()), expected).cosine
    dense = 1 - agreement(logits(load(twin, dtype=dtype), tokens()), expected).cosine
    assert gap < 2 * dense


def test_cast_and_move_leave_packed_weights_alone(sliced: Callable[..., Path]) -> None:
    model = load(sliced("glm4_moe", (3, 4, 3, 4), 2, (1, 1)))
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if "experts" in name}
    model.to(torch.bfloat16).to("cpu")
    assert model.model.norm.weight.dtype == torch.bfloat16
    for name, buffer in before.items():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert logits(model, tokens()).isfinite().all()


def test_weights_are_in_memory_once(sliced: Callable[..., Path]) -> None:
    """The named buffers of experts are parts of what the kernel reads."""
    model = load(sliced("glm4_moe", (3, 4, 3, 4), 2, (1, 1)))
    experts = model.model.layers[1].mlp.experts
    packed = experts.weights.w13_trellis.untyped_storage().data_ptr()
    for expert in range(4):
        trellis = experts.get_buffer(f"{expert}.up_proj.rank1.trellis")
        assert trellis.untyped_storage().data_ptr() == packed
    assert not list(experts.parameters())


@pytest.mark.parametrize(("layout", "rows"), [("per_expert_v1", 8), ("shared_h_v1", 2)])
def test_shared_vectors_are_in_memory_once(
    layout: str, rows: int, sliced: Callable[..., Path]
) -> None:
    """One for each of two slices, not for each slice of four experts."""
    model = load(sliced("glm4_moe", 3, 2, (1, 1), rotation_layout=layout))
    weights = model.model.layers[1].mlp.experts.weights
    assert (weights.w13_suh.shape[:2], len(weights.w2_svh)) == ((2, rows), rows)


def test_state_dict_loads_back(ordinary: Callable[..., Path]) -> None:
    model = load(ordinary("qwen3_moe"))
    expected = logits(model, tokens())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for buffer in model.buffers():
        if buffer.dtype == torch.int16:
            buffer.zero_()
    assert not torch.equal(logits(model, tokens()), expected)
    model.load_state_dict(state)
    assert torch.equal(logits(model, tokens()), expected)
    state["model.layers.1.mlp.experts.0.up_proj.trellis"].zero_()
    model.load_state_dict(state, assign=True)
    assert not model.model.layers[1].mlp.experts.weights.w13_trellis[1, 0].any()


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"])
def test_device_map(device_map: Any, ordinary: Callable[..., Path]) -> None:
    checkpoint = ordinary("qwen3_moe")
    expected = logits(load(checkpoint), tokens())
    assert torch.equal(logits(load(checkpoint, device_map=device_map), tokens()), expected)


def test_offloading(ordinary: Callable[..., Path], tmp_path: Path) -> None:
    """accelerate moves plain weights only, which works; asked to move buffers too, it cannot."""
    checkpoint = ordinary("qwen3_moe")
    expected = logits(load(checkpoint), tokens())
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head"), "cpu")
    places |= {"model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    options = {"device_map": places, "offload_folder": tmp_path / "offload"}
    assert torch.equal(logits(load(checkpoint, **options), tokens()), expected)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1.*cannot be offloaded"):
        load(checkpoint, **options, offload_buffers=True)


def test_model_without_head(ordinary: Callable[..., Path]) -> None:
    checkpoint = ordinary("qwen3_moe")
    body = AutoModel.from_pretrained(checkpoint, dtype=torch.float16)
    whole = load(checkpoint, dtype=torch.float16)
    assert isinstance(body.layers[0].self_attn.q_proj, Exl3Linear)
    assert isinstance(body.layers[1].mlp.experts, Exl3Experts)
    with torch.no_grad():
        expected = whole.model(tokens()).last_hidden_state
        assert torch.equal(body(tokens()).last_hidden_state, expected)


def test_head_of_its_own_is_untied(ordinary: Callable[..., Path]) -> None:
    """exllamav3 up to 1.4.1 leaves tie_word_embeddings true beside a quantised head."""
    checkpoint = ordinary("qwen3")
    expected = logits(load(checkpoint), tokens())
    model = load(edit_config(checkpoint, tie_word_embeddings=True))
    assert isinstance(model.lm_head, Exl3Linear)
    assert model.config.tie_word_embeddings is False
    assert torch.equal(logits(model, tokens()), expected)
    model.tie_weights()
    assert torch.equal(logits(model, tokens()), expected)


def test_tied_head_stays_tied(ordinary: Callable[..., Path]) -> None:
    model = load(ordinary("qwen3", tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_shim_of_published_files(sliced: Callable[..., Path]) -> None:
    checkpoint = sliced("glm4_moe", 3, 2, (1, 1))
    expected = logits(load(checkpoint), tokens())
    shim = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*"]}
    assert torch.equal(
        logits(load(edit_config(checkpoint, quantization_config=shim)), tokens()), expected
    )


def test_nothing_is_reported_for_next_token_layers(
    ordinary: Callable[..., Path],
) -> None:
    model, report = load(ordinary("glm4_moe", mtp_layers=1), output_loading_info=True)
    assert not any(report.values())
    assert len(model.model.layers) == 2


def test_gradients_are_refused(ordinary: Callable[..., Path]) -> None:
    model = load(ordinary("llama"))
    assert model.hf_quantizer.is_trainable is False
    with pytest.raises(RuntimeError, match="no autograd formula"):
        model(tokens()).logits.sum().backward()


def _replace(name: str, value: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value})


DAMAGED = [
    (lambda t: t.pop(f"{GATE}.trellis"), CheckpointError, rf"missing: {GATE}\.weight"),
    (lambda t: t.pop(f"{Q_PROJ}.suh"), CheckpointError, rf"{Q_PROJ}\.suh' is missing"),
    (lambda t: t.pop("model.norm.weight"), CheckpointError, r"missing: model\.norm\.weight"),
    (_replace(f"{Q_PROJ}.svh", torch.ones(128).half()), CheckpointError, r"expected.*\[256\]"),
    (_replace("model.extra.weight", torch.ones(2, 2)), CheckpointError, r"model\.extra\.weight"),
    (lambda t: t[f"{Q_PROJ}.suh"].fill_(torch.nan), FormatError, rf"{Q_PROJ}\.suh.*nan at 0"),
    (lambda t: t[f"{GATE}.suh"].fill_(torch.inf), FormatError, rf"{GATE}\.suh.*inf at 0"),
    (lambda t: t[f"{Q_PROJ}.mul1"].fill_(1), FormatError, rf"{Q_PROJ}\.mul1.*0x83DCD12D"),
    (_replace(f"{Q_PROJ}.mcg", torch.tensor(1)), CheckpointError, rf"{Q_PROJ}\.mcg"),
]


@pytest.mark.parametrize("change, error, words", DAMAGED)
def test_damage_is_named(
    change: Callable[[Tensors], object],
    error: type[Exception],
    words: str,
    ordinary: Callable[..., Path],
) -> None:
    checkpoint = edit(ordinary("qwen3_moe"), change)
    with pytest.raises(error, match=words):
        load(checkpoint)


def test_missing_rank_is_named(sliced: Callable[..., Path]) -> None:
    name = f"{GATE}.rank1.trellis"
    with pytest.raises(CheckpointError, match=f"layer 1: 1 tensors are missing: {name}"):
        load(edit(sliced("glm4_moe", 3, 2, (1, 1)), lambda tensors: tensors.pop(name)))


def test_padding_that_is_not_zero_is_refused(ordinary: Callable[..., Path]) -> None:
    """Between up and down the kernel crops nothing, so surplus channels would count."""
    up = GATE.replace("gate", "up")
    checkpoint = ordinary("qwen3_moe", moe_intermediate_size=96)
    edit(checkpoint, lambda tensors: tensors[f"{GATE}.svh"].fill_(1))
    load(checkpoint)  # a zero in one of the two is enough: they are multiplied
    edit(checkpoint, lambda tensors: tensors[f"{up}.svh"].fill_(1))
    with pytest.raises(CheckpointError, match=rf"{GATE}\.svh.*{up}\.svh.*last 32 channels"):
        load(checkpoint)


def test_codebooks_of_one_layer_must_be_one(ordinary: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        del tensors[f"{GATE}.mul1"]

    with pytest.raises(UnsupportedError, match=rf"{GATE}: expected codebook mul1.*got 3inst"):
        load(edit(ordinary("qwen3_moe"), change))


def test_dense_expert_beside_exl3_is_refused(ordinary: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        for field in ("trellis", "suh", "svh", "mul1"):
            del tensors[f"{GATE}.{field}"]
        tensors[f"{GATE}.weight"] = torch.zeros(128, 128)

    with pytest.raises(UnsupportedError, match=rf"all experts EXL3 or none.*{GATE}\.weight"):
        load(edit(ordinary("qwen3_moe"), change))


def test_exl3_router_is_refused(ordinary: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.layers.0.mlp.gate.weight"]
        fields = random_exl3(128, 128, 3, "mcg").tensors()
        tensors.update({f"model.layers.0.mlp.gate.{name}": t for name, t in fields.items()})

    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.mlp\.gate'.*in BF16"):
        load(edit(ordinary("qwen3_moe"), change))


def test_row_table_is_refused(ordinary: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedError, match=r"model\.embed_tokens: expected a \.weight"):
        load(ordinary("llama", OrdinaryOptions(embedding_bits=4)))


def test_fp8_beside_exl3_is_refused(ordinary: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        for field in ("trellis", "suh", "svh", "mul1"):
            del tensors[f"{Q_PROJ}.{field}"]
        tensors[f"{Q_PROJ}.weight"] = torch.zeros(256, 128).to(torch.float8_e4m3fn)
        tensors[f"{Q_PROJ}.weight_scale_inv"] = torch.ones(2, 1)

    checkpoint = edit(ordinary("llama"), change)
    config = json.loads((checkpoint / "config.json").read_text())
    block = {**config["quantization_config"], "weight_block_size": [128, 128]}
    with pytest.raises(UnsupportedError, match=rf"{Q_PROJ}\.weight.*got FP8"):
        load(edit_config(checkpoint, quantization_config=block))


@pytest.mark.parametrize("method", ["exl3", "modelopt"])
def test_checkpoint_without_exl3_is_refused(method: str, tmp_path: Path) -> None:
    checkpoint = write_plain(tmp_path / "plain", tiny_config_of("llama"))
    edit_config(checkpoint, quantization_config={"quant_method": method})
    with pytest.raises(UnsupportedError, match="holds no EXL3"):
        load(checkpoint)


def test_other_architecture_is_refused(ordinary: Callable[..., Path]) -> None:
    keys = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    checkpoint = edit_config(ordinary("llama"), **keys)
    with pytest.raises(UnsupportedError, match="got 'MistralForCausalLM'"):
        load(checkpoint)


def test_activation_other_than_silu_is_refused(ordinary: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedError, match="hidden_act: expected 'silu', got 'gelu'"):
        load(ordinary("qwen3_moe", hidden_act="gelu"))


def test_dtype_is_refused(ordinary: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedError, match=r"dtype: expected.*got torch\.float64"):
        load(ordinary("llama"), dtype=torch.float64)


def test_quantising_is_refused(tmp_path: Path) -> None:
    checkpoint = write_plain(tmp_path / "plain", tiny_config_of("llama"))
    with pytest.raises(UnsupportedError, match="exl3kit quantize"):
        AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=Exl3Config())


@pytest.mark.slow
def test_compiled_is_one_graph(ordinary: Callable[..., Path]) -> None:
    """By inductor, experts included: no break, and the same logits but for fused roundings."""
    model = load(ordinary("qwen3_moe", num_hidden_layers=1))
    compiled = torch.compile(model, fullgraph=True)
    found = agreement(logits(compiled, tokens()), logits(model, tokens()))
    assert found.cosine > 1 - 1e-10 and found.top1 == 1.0, found
