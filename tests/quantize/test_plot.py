"""The plot of errors by layer: a PNG that changes with what is in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.quantize.hessian import Coverage
from exl3kit.quantize.journal import MatrixResult
from exl3kit.quantize.plot import plot_errors
from exl3kit.quantize.report import summarise

PNG = b"\x89PNG\r\n\x1a\n"


def result(name: str, error: float) -> MatrixResult:
    return MatrixResult(name, 3, error, 0.9, Coverage.ALL, 64)


RESULTS = [
    *(
        result(f"model.layers.{layer}.mlp.experts.{expert}.up_proj.rank0", 0.01 * (1 + layer))
        for layer in (1, 2)
        for expert in range(3)
    ),
    result("model.layers.1.self_attn.o_proj", 0.002),
    result("lm_head", 0.001),
]


def test_equal_errors_make_equal_pictures_and_others_do_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    worse = [result("lm_head", 0.1), *RESULTS[:-1]]
    for name, results in (("a", RESULTS), ("b", RESULTS), ("c", worse), ("d", RESULTS[:6])):
        plot_errors(summarise(results), "model", tmp_path / name)
    pictures = [(tmp_path / name).read_bytes() for name in "abcd"]
    assert all(picture.startswith(PNG) for picture in pictures)
    assert pictures[0] == pictures[1]
    assert len(set(pictures)) == 3


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(CheckpointError, match=r"absent: cannot write: No such file"):
        plot_errors(summarise(RESULTS), "model", tmp_path / "absent" / "x.png")


def test_without_matplotlib_it_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'exl3kit\[report\]'"):
        plot_errors(summarise(RESULTS), "model", tmp_path / "x.png")
