"""Failures that users met in other EXL3 tools and engines, and the tests that keep them away here.

Those of metadata, names, loading and slicing. Each row is a kind of failure with the public report
of it; this module checks that the tests it names exist.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_FORK = "https://github.com/local-inference-lab"
_VLLM = "https://github.com/vllm-project/vllm"
_EXLLAMA = "https://github.com/turboderp-org/exllamav3"
_PATH_TEST = (
    f"{_FORK}/vllm/blob/e371d81ff147d13becd2bf12c34f46c00455a234/tests/quantization/"
    "test_exl3_security.py"
)
_MEMORY_NOTE = (
    "https://github.com/brandonmmusic-max/vllm/blob/454b6b783045416e03c6a31731283523e4fc31e3/"
    "vllm/model_executor/layers/quantization/exl3.py"
)
_WIDTH_TEST = (
    "checkpoint/test_runtime_checks.py::test_width_that_is_not_a_multiple_of_128_lists_what_works"
)

# What went wrong; where it was reported; the tests, as file::name below tests/.
FAILURES: list[tuple[str, str, tuple[str, ...]]] = [
    (
        "names with a rank are unknown to the draft model's loader",
        f"{_FORK}/vllm/pull/139",
        (
            "integrations/vllm/test_loader.py::test_each_rank_sees_its_own_slices_and_all_other_tensors",
            "integrations/vllm/test_engine.py::test_quantised_draft_is_accepted_and_lossless",
        ),
    ),
    (
        "the modelopt shim wins the choice of method, experts are built unquantised",
        f"{_FORK}/vllm/pull/279",
        (
            "integrations/vllm/test_config.py::test_vllm_itself_chooses_exl3_behind_the_shim",
            "integrations/vllm/test_config.py::test_a_named_other_method_is_warned_about_once",
        ),
    ),
    (
        "parameters keep views of a buffer that the loader uses again",
        f"{_FORK}/vllm/pull/282",
        ("integrations/vllm/test_moe.py::test_loaded_bytes_survive_a_reused_buffer",),
    ),
    (
        "a missing codebook marker decodes as another codebook",
        f"{_FORK}/b12x/pull/90",
        (
            "checkpoint/test_open.py::test_errors_name_the_tensor",
            "integrations/vllm/test_loader.py::test_markers_of_the_own_rank_are_checked",
            "slicing/test_plan.py::test_bad_tensors",
        ),
    ),
    (
        "the reference to the bitrate map reads outside the folder",
        _PATH_TEST,
        ("checkpoint/test_manifest.py::test_map_reference_must_be_a_bare_file_name",),
    ),
    (
        "experts under other projection names are not seen as EXL3",
        f"{_FORK}/vllm/pull/139",
        ("integrations/vllm/test_config.py::test_detection_does_not_look_at_projection_names",),
    ),
    (
        "one bitrate a layer is assumed, experts differ",
        "https://github.com/vcruz305/vllm-exl3/pull/10",
        (
            "integrations/vllm/test_moe.py::test_different_bits_in_different_layers_are_fine",
            "integrations/vllm/test_mixed.py::test_ranks_sum_to_the_decoded_experts",
            "integrations/vllm/test_mixed.py::test_gate_and_up_of_different_rates",
            "slicing/test_plan.py::test_bad_tensors",
            "slicing/test_sources.py::test_r7_with_rates_that_differ_within_an_expert",
        ),
    ),
    (
        "source tensors stay in memory, 200 MiB a layer",
        _MEMORY_NOTE,
        (
            "integrations/vllm/test_moe.py::test_trellis_is_the_only_resident_copy",
            "integrations/vllm/test_mixed.py::test_nothing_but_the_parameters_is_kept_of_a_layer",
        ),
    ),
    (
        "a second layer with another split of rates gives wrong sums",
        f"{_FORK}/b12x/pull/117",
        ("integrations/vllm/test_mixed.py::test_layers_with_splits_of_their_own",),
    ),
    (
        "float32 tensors beside the weights are cast to BF16",
        f"{_VLLM}/pull/53906",
        ("slicing/test_job.py::test_every_byte_is_the_sources",),
    ),
    (
        "a linear whose width is no multiple of 128",
        f"{_FORK}/vllm/pull/312",
        ("testing/test_checkpoints.py::test_biases_have_the_padded_length",),
    ),
    (
        "both sides need padding, one is padded",
        f"{_EXLLAMA}/pull/20",
        ("checkpoint/test_ordinary.py::test_both_sides_are_padded",),
    ),
    (
        "a tensor-parallel size that cuts inside a block of 128 fails late",
        f"{_VLLM}/pull/44763",
        (
            _WIDTH_TEST,
            "slicing/test_plan.py::test_tp_that_cannot_be",
            "slicing/test_sources.py::test_padded_width_that_is_no_multiple",
        ),
    ),
    (
        "slices smaller than one quantisation block",
        f"{_VLLM}/issues/52997",
        ("slicing/test_axes.py::test_boundaries_inside_a_hadamard_block",),
    ),
    (
        "a deleted shard loads without a word",
        f"{_VLLM}/pull/34930",
        (
            "checkpoint/test_index.py::test_deleted_shard_is_named_with_or_without_index",
            "integrations/vllm/test_config.py::test_a_missing_shard",
        ),
    ),
    (
        "experts one by one are taken for fused ones, since a trellis has three dimensions",
        f"{_FORK}/vllm/pull/766",
        ("integrations/vllm/test_moe.py::test_parameters_hold_the_stored_bytes",),
    ),
    (
        "a tied head gets a quantised method that cannot be tied",
        f"{_VLLM}/issues/45543",
        ("integrations/vllm/test_config.py::test_a_head_that_is_not_stored_is_left_to_vllm",),
    ),
    (
        "the config says tied, the file has a head of its own",
        "https://github.com/dphnAI/sonar/pull/1635",
        (
            "checkpoint/test_ordinary.py::test_tied_head_with_its_own_trellis",
            "integrations/vllm/test_head.py::test_a_stored_head_is_not_tied",
        ),
    ),
    (
        "the file is newer than the reader, which does not say so",
        "https://github.com/theroyallab/tabbyAPI/issues/344",
        ("checkpoint/test_ordinary.py::test_newer_version_is_warned_of_once",),
    ),
    (
        "the draft's config never reaches the plugin, its experts stay unquantised",
        f"{_FORK}/vllm/issues/183",
        ("integrations/vllm/test_loader.py::test_a_draft_that_missed_the_config_is_refused",),
    ),
    (
        "the next-token layer is BF16 and taken for quantised",
        f"{_VLLM}/pull/49187",
        ("integrations/vllm/test_engine.py::test_one_rank_with_a_plain_draft",),
    ),
    (
        "the next-token layer is lost in conversion",
        "https://github.com/NVIDIA/Model-Optimizer/pull/2312",
        (
            "checkpoint/test_verify.py::test_draft_layer_that_was_left_out",
            "slicing/test_job.py::test_every_architecture",
        ),
    ),
    (
        "NaN in a scale vector",
        f"{_EXLLAMA}/pull/239",
        (
            "checkpoint/test_sanity.py::test_bad_values_are_named",
            "checkpoint/test_verify.py::test_faults_name_the_tensor",
        ),
    ),
]


@cache
def _names(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("failure, source, tests", FAILURES, ids=[row[0] for row in FAILURES])
def test_the_tests_exist(failure: str, source: str, tests: tuple[str, ...]) -> None:
    assert tests and source.startswith("https://"), failure
    for name in tests:
        file, _, function = name.partition("::")
        assert function in _names(file), name
