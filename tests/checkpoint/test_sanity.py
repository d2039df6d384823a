"""Values that cannot be weights: found, named, and nothing else is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3kit.checkpoint.header import read_header
from exl3kit.checkpoint.manifest import SHARED_H
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.sanity import sanity_faults
from exl3kit.checkpoint.values import TensorFacts, read_facts
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.checkpoint.writer import CHECKSUMS_NAME
from exl3kit.format.spec import Codebook
from exl3kit.models.registry import model_map
from exl3kit.testing.generate import make_rank_sliced, random_exl3

GATE = "model.layers.2.mlp.experts.1.gate_proj.rank0"
Tensors = dict[str, torch.Tensor]


def faults(folder: Path, jobs: int = 1) -> list[str]:
    return list(verify_checkpoint(folder, model_map, jobs).faults)


def change(folder: Path, name: str, edit: Callable[[torch.Tensor], object]) -> None:
    """Edit one tensor in place, and drop the digests that would notice."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    edit(tensors[name])
    save_file(tensors, file)
    (folder / CHECKSUMS_NAME).unlink(missing_ok=True)


CASES: list[tuple[str, str, Callable[[torch.Tensor], object], str]] = [
    ("one tile", f"{GATE}.trellis", lambda t: t[3, 2].zero_(), "1 tiles hold zeros only: they"),
    ("half a trellis", f"{GATE}.trellis", lambda t: t[8:].zero_(), "64 tiles hold zeros only"),
    ("constant", f"{GATE}.trellis", lambda t: t.fill_(77), "every word of the trellis is the same"),
    ("no scales", f"{GATE}.svh", lambda t: t.zero_(), "all 128 values are 0"),
    ("nan", "model.layers.0.mlp.up_proj.weight", lambda t: t[1, 2].fill_(torch.nan),
     "1 of 131072 values are not finite, first nan at 258"),
    ("inf", "model.norm.weight", lambda t: t[255:].fill_(-torch.inf), "first -inf at 255"),
    ("empty matrix", "model.layers.0.mlp.up_proj.weight", lambda t: t.zero_(),
     "all 131072 values are 0"),
    ("too large", f"{GATE}.suh", lambda t: t.mul_(1000), "root mean square of 6"),
    ("too small", f"{GATE}.svh", lambda t: t.mul_(0.001), "the median of the 8 gate_proj of model"),
    ("huge", "model.layers.0.mlp.up_proj.weight", lambda t: t.fill_(1e30), "beyond float32"),
    ("dense", "model.layers.1.self_attn.q_proj.weight", lambda t: t.mul_(1000),
     "linears of model.layers.1 is"),
]  # fmt: skip


@pytest.mark.parametrize("case, name, edit, text", CASES, ids=[case[0] for case in CASES])
def test_bad_values_are_named(
    sliced_folder: Path,
    case: str,
    name: str,
    edit: Callable[[torch.Tensor], object],
    text: str,
) -> None:
    change(sliced_folder, name, edit)
    (fault,) = faults(sliced_folder)
    assert name.rpartition(".")[0] in fault and text in fault


def test_zeros_that_may_be(sliced_folder: Path) -> None:
    """A norm or a bias of zeros is a trained value or an initial one."""
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    change(sliced_folder, bias, lambda t: t.zero_())
    assert faults(sliced_folder) == []


def test_shard_of_zeros_is_one_fault(sliced_folder: Path) -> None:
    """What a broken download leaves: a file of the right size whose data were never written."""
    file = sorted(sliced_folder.glob("*.safetensors"))[1]
    header = read_header(file)
    start = min(info.start for info in header.tensors.values())
    data = file.read_bytes()
    file.write_bytes(data[:start] + bytes(len(data) - start))
    (sliced_folder / CHECKSUMS_NAME).unlink()
    found = [fault for fault in faults(sliced_folder) if "expected marker value" not in fault]
    (fault,) = found
    assert fault.startswith(f"{file}: all {len(data) - start} bytes of tensor data are 0: they")


def test_shard_whose_end_reads_as_zeros(sliced_folder: Path) -> None:
    (sliced_folder / CHECKSUMS_NAME).unlink()
    for file in sorted(sliced_folder.glob("*.safetensors")):
        data = file.read_bytes()
        file.write_bytes(data[:-100_000] + bytes(100_000))
        found = "\n".join(faults(sliced_folder))
        assert "from the middle of a row on" in found or "tiles hold zeros only" in found
        file.write_bytes(data)


def test_padded_matrix_is_no_broken_one(sliced_folder: Path) -> None:
    """Zeros in the last columns and the last rows, as of widths padded to multiples of 128."""
    name = "model.layers.0.mlp.up_proj.weight"

    def pad(weight: torch.Tensor) -> None:
        weight[:, 200:] = 0
        weight[400:] = 0

    change(sliced_folder, name, pad)
    assert faults(sliced_folder) == []
    change(sliced_folder, name, lambda t: t[399, 100:].zero_())
    (fault,) = faults(sliced_folder)
    assert name in fault and f"the last {112 * 256 + 156} values are 0" in fault


@pytest.mark.parametrize("start, count", [(70_001, 2000), (257, 100_000)])
def test_hole_in_the_middle(sliced_folder: Path, start: int, count: int) -> None:
    """Where one of several connections broke off."""
    name = "model.layers.0.mlp.up_proj.weight"
    change(sliced_folder, name, lambda t: t.view(-1)[start : start + count].zero_())
    (fault,) = faults(sliced_folder)
    assert f"'{name}': in between {count} values are 0, from the middle" in fault


BLOCK = 2**20 // 4  # float32 values of a block


@pytest.mark.parametrize(
    "start, count, gap, tail",
    [
        (5, 1024, (5, 1024), 0),
        (5, 1023, (0, 0), 0),
        (BLOCK - 10, 2000, (BLOCK - 10, 2000), 0),
        (BLOCK - 2000, 2000, (BLOCK - 2000, 2000), 0),
        (BLOCK, BLOCK, (BLOCK, BLOCK), 0),
        (7, 2 * BLOCK, (7, 2 * BLOCK), 0),
        (0, BLOCK + 3, (0, BLOCK + 3), 0),
        (BLOCK + 3, 3 * BLOCK, (0, 0), 2 * BLOCK - 3),
    ],
)
def test_runs_of_zeros_across_blocks(
    tmp_path: Path, start: int, count: int, gap: tuple[int, int], tail: int
) -> None:
    values = torch.ones(3 * BLOCK)
    values[start : start + count] = 0
    file = tmp_path / "x.safetensors"
    save_file({"a.weight": values}, file)
    facts = read_facts(file, read_header(file).tensors.values(), False, lambda size: None)
    found = facts.tensors["a.weight"]
    assert (found.gap, found.num_tail) == (gap, tail)


def test_rows_of_zeros_are_no_hole(sliced_folder: Path) -> None:
    """Tokens that were never trained, and a matrix whose last columns are padding besides."""
    name = "model.layers.0.mlp.up_proj.weight"
    change(sliced_folder, name, lambda t: t[100:140].zero_())
    assert faults(sliced_folder) == []
    change(sliced_folder, name, lambda t: t[:, 250:].zero_())
    assert faults(sliced_folder) == []


def test_shared_vectors_count(plain_folder: Path, tmp_path: Path) -> None:
    """One rank's shared vector makes its slices of all experts of the layer too large."""
    out = make_rank_sliced(plain_folder, tmp_path / "m", 3, 2, (1, 3), rotation_layout=SHARED_H)
    assert faults(out) == []
    name = "model.layers.2.mlp.experts.shared_h.up_proj.rank1.suh"
    change(out, name, lambda t: t.mul_(10_000))
    found = faults(out)
    assert len(found) == 4 and all("up_proj.rank1: the decoded" in fault for fault in found)


@pytest.mark.parametrize("codebook", list(Codebook))
def test_rms_needs_no_decoding(codebook: Codebook) -> None:
    from exl3kit.checkpoint.sanity import _deviation

    tensor = random_exl3(512, 256, 3, codebook)
    vectors = [v.double().square().mean().sqrt() for v in (tensor.suh, tensor.svh)]
    estimate = float(vectors[0] * vectors[1]) * _deviation(codebook)
    found = float(tensor.dequantize(torch.float64).square().mean().sqrt())
    assert abs(estimate / found - 1) < 0.02


def test_jobs_and_progress_do_not_change_the_report(sliced_folder: Path) -> None:
    change(sliced_folder, f"{GATE}.svh", lambda t: t.zero_())
    seen: list[tuple[int, int]] = []
    one = verify_checkpoint(sliced_folder, model_map, 1, lambda *step: seen.append(step))
    four = verify_checkpoint(sliced_folder, model_map, 4)
    assert one == four
    assert seen[-1] == (one.num_bytes, one.num_bytes)
    assert seen == sorted(seen)


def test_digest_of_a_file_with_tensors_that_another_has_too(sliced_folder: Path) -> None:
    """Its bytes are read apart: the pass over the values leaves the doubled tensors out."""
    files = sorted(sliced_folder.glob("*.safetensors"))
    shutil.copy(files[0], sliced_folder / "more.safetensors")
    text = "\n".join(faults(sliced_folder))
    assert "the same tensors are in both" in text and "sha256" not in text


def test_facts_in_blocks(tmp_path: Path) -> None:
    """Tensors larger than a block, and what is at their ends."""
    floats = torch.ones(3_000_000)
    floats[-1] = torch.inf
    trellis = torch.full((256, 256, 48), 5, dtype=torch.int16)
    other = trellis.clone()
    other[-1, -1, -1] = 4
    file = tmp_path / "x.safetensors"
    save_file({"a.weight": floats, "b.trellis": trellis, "c.trellis": other}, file)
    infos = read_header(file).tensors
    counts: list[int] = []
    found = read_facts(file, infos.values(), True, counts.append).tensors
    assert found["a.weight"].first_bad == (2_999_999, torch.inf)
    assert found["b.trellis"].is_constant and not found["c.trellis"].is_constant
    assert sum(counts) == sum(info.nbytes for info in infos.values())


def test_groups_of_few_have_no_outliers(sliced_folder: Path) -> None:
    checkpoint = open_checkpoint(sliced_folder)
    names = [f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv"]
    facts = {name: TensorFacts(1, 10.0 ** (6 * i), is_zero=False) for i, name in enumerate(names)}
    assert sanity_faults(checkpoint, facts) == []


_PEAK = """
import resource, sys
from pathlib import Path
from exl3kit.checkpoint.header import read_header
from exl3kit.checkpoint.values import read_facts
path = Path(sys.argv[1])
infos = read_header(path).tensors.values()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read_facts(path, infos, True, lambda size: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    """128 MiB in one tensor, most of it a hole in the file."""
    size = 2**27
    header = json.dumps(
        {"embed.weight": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}
    ).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with path.open("r+b") as file:
        file.truncate(8 + len(header) + size)
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 64 * 1024  # KiB
