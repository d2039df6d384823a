"""The demo model: its scripts, and what its model card claims, on a small scale."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "demo-model"


@pytest.fixture(scope="module")
def scripts() -> dict[str, ModuleType]:
    """The scripts as modules; they import each other from their own folder, as when run."""
    sys.path.insert(0, str(EXAMPLES))
    names = ("tiny_glm4_moe", "train_tiny", "train_data", "wordnet_chat", "measure_tiny")
    modules = {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(EXAMPLES))
    return modules


def test_committed_model_predicts_held_out_text(scripts: dict[str, ModuleType]) -> None:
    measure = scripts["measure_tiny"]
    model = measure.load_model(DEMO)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokens = torch.tensor(tokenizer.encode((DEMO / "held_out.txt").read_text()).ids)
    chats, prose = tokens[: 4 * measure.WINDOW], tokens[-4 * measure.WINDOW :]
    base = measure.perplexity(model, torch.cat([chats, prose]))
    assert base < 25  # the whole file: 19.3
    assert measure.changed_perplexity(model, torch.cat([chats, prose]), None) > 1.3 * base
    answer = measure.answer(model, tokenizer, "What is a lighthouse?")
    assert answer.startswith("A lighthouse is a tower with a light")


def test_committed_files_are_small_and_indexed() -> None:
    index = json.loads((DEMO / "model.safetensors.index.json").read_text())
    shards = {p.name: load_file(p) for p in sorted(DEMO.glob("model-*.safetensors"))}
    stored = {name: file for file, tensors in shards.items() for name in tensors}
    assert stored == index["weight_map"]
    assert sum(p.stat().st_size for p in DEMO.glob("model-*.safetensors")) <= 24 * 2**20
    assert "model.layers.4.eh_proj.weight" in stored
    routed = [n for n in stored if ".mlp.experts." in n]
    elements = {n: shards[f][n].numel() for n, f in stored.items()}
    assert sum(elements[n] for n in routed) > 0.5 * sum(elements.values())


def test_checkpoint_round_trip(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    module = scripts["tiny_glm4_moe"]
    torch.manual_seed(0)
    config = module.TinyConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, head_dim=8)
    model = module.TinyGlm4Moe(config)
    for router in model.routers().values():
        router.e_score_correction_bias.uniform_(-0.1, 0.1)
    model.load_state_dict(
        {n: t if "bias" in n else t.bfloat16().float() for n, t in model.state_dict().items()}
    )
    scripts["train_tiny"].write_checkpoint(model, tmp_path)
    tokens = torch.randint(64, (2, 20))
    loaded = scripts["measure_tiny"].load_model(tmp_path)
    torch.testing.assert_close(loaded(tokens), model(tokens), rtol=0, atol=0)


def test_router_uses_bias_for_choice_only(scripts: dict[str, ModuleType]) -> None:
    module = scripts["tiny_glm4_moe"]
    router = module.Router(module.TinyConfig(hidden_size=4, routed_scaling_factor=1.5))
    torch.nn.init.normal_(router.weight)
    x = torch.randn(5, 4)
    router.e_score_correction_bias[[1, 6]] = 10.0
    scores = torch.sigmoid(x @ router.weight.T)[:, [1, 6]]
    weights = router(x)
    expected = 1.5 * scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(weights[:, [1, 6]], expected)
    assert int((weights > 0).sum()) == 10
    router.balance(0.5)
    assert router.e_score_correction_bias[1] == 9.5
    assert router.e_score_correction_bias[0] == 0.5


def test_mtp_loss_leaves_the_trunk_alone(scripts: dict[str, ModuleType]) -> None:
    module = scripts["tiny_glm4_moe"]
    config = module.TinyConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, head_dim=8)
    model = module.TinyGlm4Moe(config)
    model.losses(torch.randint(64, (2, 12)))[1].backward()
    trained = {n.split(".")[2] for n, p in model.named_parameters() if p.grad is not None}
    assert trained == {"2"}
    assert model.lm_head.weight.grad is None


def test_wordnet_line_becomes_a_pair(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    chat = scripts["wordnet_chat"]
    noun = '06 n 02 lighthouse 0 pharos 0 001 @ 00000002 n 0000 | a tower with a light; "a dim one"'
    (tmp_path / "data.noun").write_text(
        f"  1 licence\n00000001 {noun}\n00000002 06 n 01 tower 0 000 | a tall and narrow building\n"
    )
    (tmp_path / "index.noun").write_text(
        "lighthouse n 1 1 @ 1 0 00000001\ntower n 1 0 1 0 00000002\n"
    )
    for pos in ("verb", "adj", "adv"):
        (tmp_path / f"data.{pos}").touch()
        (tmp_path / f"index.{pos}").touch()
    (tmp_path / "cntlist.rev").write_text("lighthouse%1:06:00:: 1 4\n")
    pairs = list(chat.WordNetChat(tmp_path, chat.Counter(), chat.Counter()).pairs())
    answers = {p.answer for p in pairs if p.key == "n00000001"}
    assert "A lighthouse is a tower with a light. It is also called a pharos." in answers
    assert "A lighthouse is a kind of tower." in answers


@pytest.mark.parametrize(
    ("paragraph", "kept"),
    [
        ("This paragraph is a plain sentence, long enough to be kept by the filter.", True),
        ("This paragraph names https://example.org and would be kept without its address.", False),
        ("SELECT * FROM table WHERE id = 1 AND name = 'x' ORDER BY id, name, and so on.", False),
        ("Too short.", False),
        ("This paragraph is a heading or a list item without a stop at its end, so it goes", False),
    ],
)
def test_prose_filter(scripts: dict[str, ModuleType], paragraph: str, kept: bool) -> None:
    assert scripts["train_data"].is_prose(paragraph) is kept
