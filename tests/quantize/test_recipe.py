"""What a recipe decides for a model, and every way in which a recipe file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from exl3kit.models.registry import model_map
from exl3kit.quantize import recipe as recipe_module
from exl3kit.quantize.recipe import Recipe, RecipeError, Rule
from exl3kit.quantize.recipe_file import read_recipe
from exl3kit.testing.tiny_configs import tiny_config_of

MODEL = model_map(tiny_config_of("glm4_moe", num_layers=3, num_experts=2, mtp_layers=1))
DEEPSEEK = model_map(tiny_config_of("deepseek_v3", num_layers=2, mtp_layers=1))


def read(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return read_recipe(path)


def documented() -> str:
    """The example in the module's docstring."""
    lines = (recipe_module.__doc__ or "").splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith("    "))


def test_the_documented_example(tmp_path: Path) -> None:
    recipe = read(tmp_path, documented())
    assert (recipe.experts, recipe.mtp, recipe.seed) == (3.25, "bf16", 0)
    assert recipe.dense == {"attention": 5, "shared_experts": 6, "head": 6}
    assert recipe.calibration.files == (tmp_path / "prose.txt", tmp_path / "chat.jsonl")
    assert (recipe.calibration.rows, recipe.calibration.cols) == (256, 512)
    assert recipe.expert_bits(MODEL) == {(1, 0): 4, (1, 1): 4, (2, 0): 4, (2, 1): 4}
    modules = recipe.module_bits(MODEL)
    attention = {f"model.layers.{i}.self_attn.{p}_proj": 5 for i in range(4) for p in "qkv"}
    assert attention.items() <= modules.items()
    assert modules["lm_head"] == modules["model.layers.1.mlp.shared_experts.up_proj"] == 6
    assert not any(name.endswith(("o_proj", "mlp.gate", "eh_proj")) for name in modules)
    assert "model.layers.0.mlp.up_proj" not in modules


def test_the_example_of_the_manual(tmp_path: Path) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "quantising.md").read_text(encoding="utf-8")
    _, _, rest = manual.partition("```toml\n")
    example, fence, _ = rest.partition("```")
    assert fence
    recipe = read(tmp_path, example)
    assert recipe.experts == 3.25 and recipe.dense == {"attention": 5, "head": 6}
    assert [rule.bits for rule in recipe.rules] == [4, None]
    assert len(recipe.expert_bits(MODEL)) == 4


def test_an_empty_recipe_changes_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "") == Recipe()
    assert Recipe().module_bits(MODEL) == Recipe().expert_bits(MODEL) == {}


def test_the_last_matching_rule_holds() -> None:
    rules = (Rule("model.layers.*", 4), Rule("*.experts.1", 3), Rule("*.layers.2.*", None))
    recipe = Recipe(dense={"head": 5}, rules=rules)
    assert recipe.expert_bits(MODEL) == {
        (1, 0): 4, (1, 1): 3, (2, 0): None, (2, 1): None, (3, 0): 4, (3, 1): 3,
    }  # fmt: skip
    modules = recipe.module_bits(MODEL)
    assert modules["model.layers.1.self_attn.q_proj"] == 4 and modules["lm_head"] == 5
    assert not any(name.startswith("model.layers.2.") for name in modules)


def test_what_every_file_keeps_is_no_module() -> None:
    modules = Recipe(rules=(Rule("*", 4),)).module_bits(DEEPSEEK)
    assert "model.layers.1.self_attn.o_proj" in modules
    assert not any(name.endswith(("kv_b_proj", "mlp.gate", "eh_proj")) for name in modules)


def test_a_rule_that_matches_nothing_is_refused() -> None:
    recipe = Recipe(rules=(Rule("model.layer.*", 4),))
    with pytest.raises(RecipeError, match=r"rule 'model\.layer\.\*': expected a pattern"):
        recipe.module_bits(MODEL)


@pytest.mark.parametrize("pattern", ["model.layers.3.*", "*.3.mlp.experts.0", "*.3.*.o_proj"])
def test_a_rule_for_copied_next_token_layers_alone_is_refused(pattern: str) -> None:
    recipe = Recipe(rules=(Rule("*.o_proj", 4), Rule("*.3.*", None), Rule(pattern, 4)))
    recipe.check_used(MODEL, ())
    with pytest.raises(RecipeError, match=r"matches next-token layers only.*mtp 'trellis'"):
        recipe.check_used(MODEL, {3})


def test_a_group_that_the_model_lacks_is_said(caplog: pytest.LogCaptureFixture) -> None:
    qwen = model_map(tiny_config_of("qwen3_moe", num_layers=2, mtp_layers=0))
    recipe = Recipe(dense={"attention": 5, "shared_experts": 5})
    recipe.check_used(qwen, ())
    (record,) = caplog.records
    assert record.getMessage() == "dense shared_experts: the model has no such linears"


def test_the_command_line_wins() -> None:
    recipe = Recipe(experts=3.25, seed=7, dense={"head": 6, "mlp": 4})
    changed = recipe.overridden(experts=2, dense={"mlp": 5}, rows=8, files=None)
    assert (changed.experts, changed.seed) == (2, 7)
    assert changed.dense == {"head": 6, "mlp": 5}
    assert changed.calibration.rows == 8 and changed.calibration.files == ()
    assert recipe.overridden() == recipe


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("expert = 3", "unknown key 'expert'; did you mean 'experts'"),
        ("zzz = 3", "unknown key 'zzz'; known are experts, mtp"),
        ("[dense]\nattn = 4", r"\[dense\]: unknown key 'attn'; .*attention"),
        ("[calibration]\nrow = 4", "did you mean 'rows'"),
        ("[[rules]]\nmodule = '*'\nbits = 3", r"\[\[rules\]\] 1: unknown key 'module'"),
        ("experts = '3'", "experts: expected bits from 1 to 8, got '3'"),
        ("experts = true", "experts: expected bits from 1 to 8, got True"),
        ("experts = 9", "got 9"),
        ("mtp = 'fp8'", "mtp: expected one of bf16, trellis, got 'fp8'"),
        ("seed = 1.0", "seed: expected a whole number of at least 0, got 1.0"),
        ("dense = 4", r"\[dense\]: expected a table, got 4"),
        ("[calibration]\nrows = 0", "rows: expected a whole number of at least 1, got 0"),
        ("[calibration]\nfiles = 'a.txt'", "files: expected a list of strings, got 'a.txt'"),
        ("[calibration]\nroute_all = 1", "route_all: expected true or false, got 1"),
        ("[rules]\nbits = 3", r"rules: expected tables, each under \[\[rules\]\]"),
        ("[[rules]]\nmodules = '*'", "key 'bits' is missing"),
        ("[[rules]]\nmodules = 3\nbits = 3", "modules: expected a string, got 3"),
        ("[[rules]]\nmodules = '*'\nbits = 'drop'", "bits from 1 to 8, or 'keep', got 'drop'"),
        ("experts = ", "not TOML"),
    ],
)
def test_refusals_name_file_and_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=rf"recipe\.toml: .*{words}"):
        read(tmp_path, text)


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"absent\.toml: cannot be read"):
        read_recipe(tmp_path / "absent.toml")
