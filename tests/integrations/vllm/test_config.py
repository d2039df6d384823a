"""Detection, facts from headers, and the method each layer gets."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig
from vllm.engine.arg_utils import EngineArgs

from exl3kit import log
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.errors import CheckpointError, Exl3Error, FormatError, UnsupportedError
from exl3kit.format.spec import Codebook
from exl3kit.integrations.vllm import compat, register
from exl3kit.integrations.vllm.config import Exl3Config
from exl3kit.integrations.vllm.facts import CheckpointFacts, checkpoint_folder, read_facts
from exl3kit.integrations.vllm.head import Exl3HeadMethod
from exl3kit.integrations.vllm.linear import Exl3LinearMethod
from exl3kit.integrations.vllm.moe import Exl3MoEMethod
from exl3kit.integrations.vllm.params import MatrixSpec
from exl3kit.testing.checkpoints import OrdinaryOptions, write_ordinary
from exl3kit.testing.generate import random_exl3
from exl3kit.testing.tiny_configs import tiny_config_of
from tests.integrations.vllm.conftest import LAYER, SIZES, FakeMoE

SHIM = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}


def block(sliced: Path) -> dict[str, Any]:
    return json.loads((sliced / "config.json").read_text())["hybrid_tr3_tail"]


def override(hf_quant: dict[str, Any], user: str | None = None, **config: Any) -> str | None:
    return Exl3Config.override_quantization_method(hf_quant, user, PreTrainedConfig(**config))


def test_rank_sliced_experts_win_over_the_shim(sliced: Path) -> None:
    tail = block(sliced)
    assert override(SHIM, hybrid_tr3_tail=tail) == "exl3"
    assert override(SHIM, "exl3", hybrid_tr3_tail=tail) == "exl3"
    assert override(SHIM, text_config={"hybrid_tr3_tail": tail}) == "exl3"
    assert override({**SHIM, "r7_routed_experts": {"schema": "r7"}}) == "exl3"


def test_other_checkpoints_are_left_alone() -> None:
    assert override(SHIM) is None
    assert override({"quant_method": "exl3"}) is None
    assert Exl3Config.override_quantization_method(SHIM, None) is None


def test_outer_and_text_config_must_agree(sliced: Path) -> None:
    tail = block(sliced)
    with pytest.raises(CheckpointError, match="differ"):
        override(SHIM, hybrid_tr3_tail=tail, text_config={"hybrid_tr3_tail": {**tail, "tp": 4}})


def test_a_named_other_method_is_warned_about_once(
    sliced: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_warned", set())
    for _ in range(2):
        assert override(SHIM, "modelopt_fp4", hybrid_tr3_tail=block(sliced)) is None
    assert len(caplog.records) == 1
    assert "exl3" in caplog.text and "modelopt_fp4" in caplog.text


def test_supported_dtypes_and_name() -> None:
    config = Exl3Config.from_config({"quant_method": "exl3"})
    assert config.get_name() == "exl3"
    assert {torch.float16, torch.bfloat16} <= set(config.get_supported_act_dtypes())


def hydrated(facts: CheckpointFacts) -> Exl3Config:
    config = Exl3Config()
    config.facts = facts
    return config


def empty(kind: type[torch.nn.Module], **attributes: Any) -> torch.nn.Module:
    """A vLLM layer that was not built: what a quant config sees of it in its constructor."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def test_update_reads_the_checkpoint_and_pickles(sliced: Path, facts: CheckpointFacts) -> None:
    config = Exl3Config()
    hf_config = AutoConfig.from_pretrained(sliced)
    config.maybe_update_config(str(sliced), hf_config=hf_config)
    assert config.facts == facts
    copy = pickle.loads(pickle.dumps(config))
    assert copy.facts == facts
    assert facts.experts[1].rates == ((3, 3, 3),) * 4 and set(facts.experts) == {1, 2}


@pytest.mark.parametrize(
    ("name", "is_needed"),
    [
        ("model.layers.0.mlp.up_proj.weight", True),
        ("model.layers.1.mlp.gate.e_score_correction_bias", True),
        ("model.layers.2.input_layernorm.weight", True),
        ("lm_head.weight", True),
        ("model.layers.3.eh_proj.weight", True),
        ("model.layers.3.shared_head.head.weight", False),
    ],
)
def test_a_missing_plain_tensor_is_named(copy: Path, name: str, is_needed: bool) -> None:
    """Shards are complete, so vLLM would serve whatever memory holds there."""
    rewrite(copy, **{name: None})
    config, hf_config = Exl3Config(), AutoConfig.from_pretrained(copy)
    if is_needed:
        with pytest.raises(CheckpointError, match=f"1 tensors are missing: {name}"):
            config.maybe_update_config(str(copy), hf_config)
    else:
        config.maybe_update_config(str(copy), hf_config)


def test_next_token_layers_may_be_left_out(copy: Path) -> None:
    names = open_checkpoint(copy).names()
    rewrite(copy, **{name: None for name in names if name.startswith("model.layers.3.")})
    Exl3Config().maybe_update_config(str(copy), AutoConfig.from_pretrained(copy))


def test_compiled_graphs_are_kept_by_the_bits_of_each_linear(copy: Path) -> None:
    """Same folder, same config.json, other rates: another digest of vLLM's own."""
    digests = []
    for bits in (3, 4, 3):
        linear = random_exl3(256, 128, bits).tensors()
        module = "model.layers.0.self_attn.o_proj"
        stored = {f"{module}.{field}": tensor for field, tensor in linear.items()}
        rewrite(copy, **{f"{module}.weight": None, **stored})
        engine = EngineArgs(model=str(copy), dtype="bfloat16").create_engine_config()
        digests.append(engine.compute_hash())
    assert digests[0] == digests[2] != digests[1]


def test_load_formats_that_bypass_the_loader(
    facts: CheckpointFacts, parallel: SimpleNamespace
) -> None:
    """The registered one is ours for four formats; the others read no ranks."""
    layer = empty(compat.LinearBase)
    hydrated(facts).get_quant_method(layer, "model.layers.0.mlp.up_proj")
    parallel.load_format = "fastsafetensors"
    with pytest.raises(UnsupportedError, match=r"auto, hf, safetensors, exl3 .*fastsafetensors"):
        hydrated(facts).get_quant_method(layer, "model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_model_without_experts(tmp_path: Path, model_type: str) -> None:
    path = write_ordinary(tmp_path / "dense", tiny_config_of(model_type))
    config = Exl3Config()
    config.maybe_update_config(str(path), AutoConfig.from_pretrained(path))
    found = config.hydrated("any")
    assert not found.experts and {"lm_head", "model.layers.0.mlp.down_proj"} <= set(found.linears)


def test_linears_in_slices_are_refused(tmp_path: Path) -> None:
    options = OrdinaryOptions(slice_width=128)
    path = write_ordinary(tmp_path / "m", tiny_config_of("llama"), options)
    with pytest.raises(UnsupportedError, match=r"mlp\.\w+\.slice\.0: a linear stored in slices"):
        read_facts(path, SIZES)


def test_experts_inside_and_outside_moe_layers(facts: CheckpointFacts) -> None:
    config, layer = hydrated(facts), empty(compat.ExpertsLayer, moe_config=FakeMoE())
    assert isinstance(config.get_quant_method(layer, LAYER), Exl3MoEMethod)
    assert config.get_quant_method(layer, "model.layers.3.mlp.experts") is None
    with pytest.raises(CheckpointError, match="layer index"):
        config.get_quant_method(layer, "mlp.experts")


def test_detection_does_not_look_at_projection_names(facts: CheckpointFacts) -> None:
    layer = empty(compat.ExpertsLayer, moe_config=FakeMoE(), ckpt_gate_proj_name="w1")
    assert isinstance(hydrated(facts).get_quant_method(layer, LAYER), Exl3MoEMethod)


def test_a_config_without_facts_refuses(facts: CheckpointFacts) -> None:
    with pytest.raises(CheckpointError, match="never saw the checkpoint"):
        Exl3Config().get_quant_method(empty(compat.ExpertsLayer), LAYER)


def test_lora_is_refused_by_name(facts: CheckpointFacts, parallel: SimpleNamespace) -> None:
    parallel.has_lora = True
    layer = empty(compat.LinearBase)
    with pytest.raises(UnsupportedError, match=r"o_proj: LoRA .* without --enable-lora"):
        hydrated(facts).get_quant_method(layer, "model.layers.0.self_attn.o_proj")


def test_linears_by_their_tensors(facts: CheckpointFacts) -> None:
    attention = "model.layers.0.self_attn"
    spec = MatrixSpec(128, 128, 3, Codebook.MCG)
    linears = {f"{attention}.{name}": spec for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    config = hydrated(CheckpointFacts(SIZES, None, linears, {}))
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    layer = empty(compat.LinearBase)
    fused = config.get_quant_method(layer, f"{attention}.qkv_proj")
    assert isinstance(fused, Exl3LinearMethod)
    assert [part.name for part in fused.parts] == [*linears][:3]
    assert isinstance(config.get_quant_method(layer, f"{attention}.o_proj"), Exl3LinearMethod)
    plain = config.get_quant_method(layer, "model.layers.0.mlp.down_proj")
    assert isinstance(plain, compat.UnquantizedLinearMethod)
    del linears[f"{attention}.k_proj"]
    with pytest.raises(CheckpointError, match=r"all must be EXL3 or none.*k_proj"):
        config.get_quant_method(layer, f"{attention}.qkv_proj")


def test_vllm_itself_chooses_exl3_behind_the_shim(copy: Path) -> None:
    """The whole of vLLM's own resolution, up to the finished engine config."""
    register()
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": SHIM}))
    arguments = EngineArgs(model=str(copy), enforce_eager=True, max_model_len=512)
    quant_config = arguments.create_engine_config().quant_config
    assert isinstance(quant_config, Exl3Config)
    assert set(quant_config.hydrated("model").experts) == {1, 2}


@pytest.fixture
def copy(sliced: Path, tmp_path: Path) -> Path:
    """A copy of the rank-sliced checkpoint that a test may damage."""
    return Path(shutil.copytree(sliced, tmp_path / "copy"))


def rewrite(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace or (None) remove tensors of the only shard; the index goes, headers are the truth."""
    (shard,) = folder.glob("*.safetensors")
    content = load_file(shard)
    for name, tensor in tensors.items():
        content.pop(name, None)
        if tensor is not None:
            content[name] = tensor
    save_file(content, shard)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def test_a_missing_expert_tensor_is_named_before_loading(copy: Path) -> None:
    name = f"{LAYER}.3.up_proj.rank1.svh"
    rewrite(copy, **{name: None})
    with pytest.raises(CheckpointError, match="layer 1: 1 tensors are missing") as error:
        read_facts(copy, SIZES)
    assert name in str(error.value)


def test_a_trellis_of_other_bits_than_declared(copy: Path) -> None:
    name = f"{LAYER}.3.up_proj.rank1.trellis"
    rewrite(copy, **{name: torch.zeros(8, 8, 64, dtype=torch.int16)})
    with pytest.raises(CheckpointError, match=r"\[8, 8, 48\], got torch\.int16 \[8, 8, 64\]"):
        read_facts(copy, SIZES)


def test_a_truncated_shard(copy: Path) -> None:
    (shard,) = copy.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{shard.name}: truncated"):
        read_facts(copy, SIZES)


@pytest.mark.parametrize("keep_index", [True, False])
def test_a_missing_shard(copy: Path, keep_index: bool) -> None:
    (shard,) = copy.glob("*.safetensors")
    shard.rename(copy / "model-00002-of-00002.safetensors")
    if not keep_index:
        (copy / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="missing shards: model-00001-of-0000"):
        read_facts(copy, SIZES)


def test_the_projection_of_a_draft_must_be_dense(copy: Path) -> None:
    """vLLM has a bare nn.Linear there."""
    module, tensors = "model.layers.3.eh_proj", random_exl3(128, 128, 4).tensors()
    rewrite(copy, **{f"{module}.{field}": tensor for field, tensor in tensors.items()})
    with pytest.raises(UnsupportedError, match=f"{module}.weight in BF16"):
        read_facts(copy, SIZES)


@pytest.mark.parametrize(
    ("stored", "kind", "message"),
    [
        ({"suh": None}, CheckpointError, r"o_proj\.suh"),
    ],
)
def test_linears_without_their_vectors(
    copy: Path, stored: dict[str, torch.Tensor | None], kind: type[Exl3Error], message: str
) -> None:
    module = "model.layers.0.self_attn.o_proj"
    fields = {**random_exl3(128, 128, 4).tensors(), **stored}
    rewrite(copy, **{f"{module}.{field}": tensor for field, tensor in fields.items()})
    with pytest.raises(kind, match=message):
        read_facts(copy, SIZES)


def test_quantised_embeddings_are_refused(copy: Path) -> None:
    name = "model.embed_tokens.trellis"
    rewrite(copy, **{name: torch.zeros(320, 24, dtype=torch.int16)})
    with pytest.raises(UnsupportedError, match=r"model\.embed_tokens: a quantised embedding"):
        read_facts(copy, SIZES)


def test_only_the_targets_head_is_quantised() -> None:
    spec = MatrixSpec(128, 384, 4, Codebook.MCG)
    config = hydrated(CheckpointFacts(SIZES, None, {"lm_head": spec}, {}))
    layer = empty(compat.ParallelLMHead)
    assert isinstance(config.get_quant_method(layer, "lm_head"), Exl3HeadMethod)
    assert config.get_quant_method(layer, "model.layers.3.head") is None


def test_a_head_that_is_not_stored_is_left_to_vllm(facts: CheckpointFacts) -> None:
    """vLLM's own method knows how to tie it to the embedding."""
    assert hydrated(facts).get_quant_method(empty(compat.ParallelLMHead), "lm_head") is None


def test_whole_experts_are_found_by_their_tensors(plain: Path, tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(2):
        for name, (ins, outs) in {"w1": (128, 256), "w2": (256, 128), "w3": (128, 256)}.items():
            linear = random_exl3(ins, outs, 4, "mul1", name=f"{LAYER}.{expert}.{name}")
            tensors |= {f"{linear.name}.{k}": v for k, v in linear.tensors().items()}
    shutil.copytree(plain, tmp_path / "whole")
    (tmp_path / "whole" / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    facts = read_facts(tmp_path / "whole", SIZES)
    experts = facts.experts[1]
    assert (experts.rates, experts.codebook) == (((4, 4, 4),) * 2, Codebook.MUL1)
    assert not experts.is_sliced and not facts.linears


def test_two_markers_on_one_linear(copy: Path) -> None:
    linear = random_exl3(128, 128, 3, name="model.layers.0.self_attn.o_proj")
    tensors = {f"{linear.name}.{k}": v for k, v in linear.tensors().items()}
    tensors[f"{linear.name}.mul1"] = torch.tensor(-2082680531, dtype=torch.int32)
    rewrite(copy, **tensors)
    with pytest.raises(FormatError, match=r"o_proj\.trellis.*at most one"):
        read_facts(copy, SIZES)


def test_a_model_that_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="hf download no-such/model-at-all"):
        checkpoint_folder("no-such/model-at-all", None)
    assert checkpoint_folder(str(tmp_path), None) == tmp_path
