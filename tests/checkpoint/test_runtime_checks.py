from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from exl3kit.checkpoint.manifest import make_manifest
from exl3kit.checkpoint.runtime_checks import RuntimeLayout, check_runtime, owned_ranks
from exl3kit.checkpoint.widths import valid_tp
from exl3kit.errors import Exl3Error

MANIFEST = make_manifest(2, {1: (3,) * 8})
LAYOUT = RuntimeLayout(
    tp_size=2,
    moe_tp_size=2,
    num_experts=8,
    hidden_size=256,
    intermediate_size=1024,
    dtype=torch.bfloat16,
    max_num_batched_tokens=2048,
    device_type="cuda",
)


def test_matching_layouts_pass() -> None:
    check_runtime(MANIFEST, LAYOUT)
    check_runtime(MANIFEST, replace(LAYOUT, dtype=torch.float16))
    check_runtime(MANIFEST, replace(LAYOUT, dtype=torch.float32, device_type="cpu"))
    check_runtime(MANIFEST, replace(LAYOUT, tp_size=1, moe_tp_size=1))


def test_width_that_files_round_up() -> None:
    """R15 is about what is stored: 320 as 384, which three ranks part at multiples of 128."""
    for tp in (1, 3):
        sizes = {"tp_size": tp, "moe_tp_size": tp, "intermediate_size": 320}
        check_runtime(make_manifest(tp, {1: (3,) * 8}), replace(LAYOUT, **sizes))
    with pytest.raises(ValueError, match=r"320, padded to 384 / tp 2 = 192 .* work: 1, 3"):
        check_runtime(MANIFEST, replace(LAYOUT, intermediate_size=320))


def test_ranks_of_the_file_that_a_rank_of_the_engine_holds() -> None:
    four = make_manifest(4, {1: (3,)})
    assert [owned_ranks(four, 2, rank) for rank in range(2)] == [range(2), range(2, 4)]
    assert owned_ranks(four, 1, 0) == range(4) and owned_ranks(four, 4, 3) == range(3, 4)
    assert owned_ranks(None, 8, 5) == range(1)


def test_a_tp_that_no_cut_reaches_is_not_promised() -> None:
    with pytest.raises(ValueError) as error:  # R11
        check_runtime(
            make_manifest(4, {1: (3,) * 8}),
            replace(LAYOUT, tp_size=8, moe_tp_size=8, intermediate_size=512),
        )
    assert "--tensor-parallel-size 1, 2, 4." in str(error.value)
    assert "further" not in str(error.value) and "quantise" not in str(error.value)


# Row of docs/checkpoints.md, the change, the built-in class, and what the message must contain.
REFUSED: list[tuple[str, dict[str, Any], type[Exception], list[str]]] = [
    (
        "R11",
        {"tp_size": 4, "moe_tp_size": 4},
        ValueError,
        [
            "cut for 2",
            "runs 4",
            "--tensor-parallel-size 1, 2.",
            "further, to tp 4, 8",
            "merges",
            "quantise the model again",
        ],
    ),
    ("R11", {"tp_size": 3, "moe_tp_size": 3}, ValueError, ["cut for 2", "runs 3"]),
    ("R12", {"num_experts": 16}, ValueError, ["has 8", "has 16"]),
    ("R13", {"ep_size": 2, "moe_tp_size": 1}, NotImplementedError, ["expert parallelism"]),
    ("R13", {"use_eplb": True}, NotImplementedError, ["EPLB"]),
    ("R13", {"has_expert_map": True}, NotImplementedError, ["expert_map"]),
    ("R13", {"has_bias": True}, NotImplementedError, ["bias"]),
    ("R13", {"router_weight_on_input": True}, NotImplementedError, ["router weight on input"]),
    ("R13", {"activation": "gelu"}, NotImplementedError, ["'gelu'"]),
    ("9", {"moe_tp_size": 4}, NotImplementedError, ["4 ranks", "data parallelism"]),
    ("R14", {"max_num_batched_tokens": None}, ValueError, ["max_num_batched_tokens"]),
    ("R14", {"max_num_batched_tokens": 0}, ValueError, ["max_num_batched_tokens"]),
    ("R15", {"hidden_size": 200}, ValueError, ["hidden_size 200", "128", "none"]),
    ("R21", {"dtype": torch.float32}, ValueError, ["torch.float32", "bfloat16"]),
    ("R21", {"dtype": torch.float64, "device_type": "cpu"}, ValueError, ["torch.float64"]),
]  # fmt: skip


@pytest.mark.parametrize("row, change, kind, texts", REFUSED)
def test_refusals(
    row: str, change: dict[str, Any], kind: type[Exception], texts: list[str]
) -> None:
    with pytest.raises(kind) as error:
        check_runtime(MANIFEST, replace(LAYOUT, **change))
    assert isinstance(error.value, Exl3Error)
    assert all(text in str(error.value) for text in texts), (row, str(error.value))


def test_width_that_is_not_a_multiple_of_128_lists_what_works() -> None:
    four = make_manifest(4, {1: (3,) * 8})
    layout = replace(LAYOUT, tp_size=4, moe_tp_size=4, intermediate_size=768)
    with pytest.raises(ValueError) as error:  # R15
        check_runtime(four, layout)
    message = str(error.value)
    assert "768 / tp 4 = 192" in message and "128" in message and "1, 2, 3, 6" in message


@pytest.mark.parametrize(
    "width, works",
    [
        (2048, (1, 2, 4, 8, 16)),
        (1536, (1, 2, 3, 4, 6, 12)),
        (1408, (1, 11)),
        (768, (1, 2, 3, 6)),
        (14336, (1, 2, 4, 7, 8, 14, 16)),
        (2304, (1, 2, 3, 6, 9)),
        (2880, ()),
    ],
)
def test_tp_values_of_known_models(width: int, works: tuple[int, ...]) -> None:
    assert valid_tp(width) == works
