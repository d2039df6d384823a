from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch

from exl3kit.errors import FormatError
from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import Codebook, marker_value
from exl3kit.testing.compare import assert_bitwise_equal
from tests import golden


@pytest.mark.parametrize("codebook", list(Codebook))
def test_all_65536_values_have_the_digest_of_exllamav3(codebook: Codebook) -> None:
    values = codebook_values(codebook).numpy().astype("<f2").tobytes()
    assert hashlib.sha256(values).hexdigest() == golden.manifest()["codebook"][codebook]["sha256"]


@pytest.mark.parametrize("codebook", list(Codebook))
def test_sample_states_match_stored_values(codebook: Codebook) -> None:
    states = golden.tensors()["cb.states"].to(torch.int32) & 0xFFFF
    assert_bitwise_equal(codebook_values(codebook)[states], golden.tensors()[f"cb.{codebook}"])


@pytest.mark.parametrize("codebook", list(Codebook))
def test_plain_names_mean_the_same_codebook(codebook: Codebook) -> None:
    assert_bitwise_equal(codebook_values(str(codebook)), codebook_values(codebook))
    assert marker_value(str(codebook)) == marker_value(codebook)


@pytest.mark.parametrize("use", [codebook_values, marker_value])
def test_unknown_names_are_refused(use: Callable[[str], object]) -> None:
    with pytest.raises(FormatError, match="expected one of 3inst, mcg, mul1, got 'MCG'"):
        use("MCG")
