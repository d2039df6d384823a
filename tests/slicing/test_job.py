from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.nn.functional import silu

from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.checkpoint.writer import UNFINISHED_NAME, CheckpointWriter
from exl3kit.errors import CheckpointError
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.models.registry import model_map
from exl3kit.slicing.apply import cut_exl3
from exl3kit.slicing.axes import rank_range
from exl3kit.slicing.job import slice_checkpoint
from exl3kit.slicing.plan import SliceOptions, plan_slice
from exl3kit.slicing.prove import source_faults
from exl3kit.testing.checkpoints import OrdinaryOptions, write_ordinary
from exl3kit.testing.compare import assert_bitwise_equal
from exl3kit.testing.generate import make_ordinary, random_exl3
from exl3kit.testing.tiny_configs import MOE_TYPES, MTP_TYPES, tiny_config_of
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model
from tests.slicing.conftest import EXPERTS, MIXED_BITS, Tensors, rewrite, same_folders

EXPERT = "model.layers.1.mlp.experts.1"


def cut(
    source: Path, out: Path, tp: int, layout: Literal["per_expert", "shared_h"] | None = None
) -> Path:
    slice_checkpoint(source, out, SliceOptions(tp, layout))
    return out


def faults(path: Path, source: Path) -> list[str]:
    """Of the checkpoint by itself, and as a slice of `source`."""
    found = source_faults(open_checkpoint(path), open_checkpoint(source), jobs=2)
    return [*verify_checkpoint(path, model_map).faults, *found]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_byte_is_the_sources(ordinary: Path, tmp_path: Path, tp: int) -> None:
    """Against the cut of validated linears, which shares no code with the slicer's plan."""
    whole, sliced = open_checkpoint(ordinary), open_checkpoint(cut(ordinary, tmp_path / "o", tp))
    model, expected = model_map(whole.config), {}
    for name in whole.names():
        if ".mlp.experts." not in name:
            expected[name] = whole.tensor(name)
    for layer in (1, 2):
        for spec in (s for e in range(EXPERTS) for s in model.expert_linears(layer, e)):
            for rank in range(tp):
                part = cut_exl3(whole.exl3(spec.name), spec.shard, rank_range("I", 512, tp, rank))
                for field, tensor in part.tensors().items():
                    expected[f"{spec.name}.rank{rank}.{field}"] = tensor
    assert sliced.names() == sorted(expected)
    for name, tensor in expected.items():
        assert_bitwise_equal(sliced.tensor(name), tensor.contiguous())
    assert faults(tmp_path / "o", ordinary) == []


def test_ranks_add_up_to_the_whole(ordinary: Path, tmp_path: Path) -> None:
    whole, sliced = open_checkpoint(ordinary), open_checkpoint(cut(ordinary, tmp_path / "o", 4))
    x = torch.randn(5, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def mlp(checkpoint: Checkpoint, suffix: str) -> torch.Tensor:
        gate, up, down = (
            checkpoint.exl3(f"{EXPERT}.{proj}{suffix}").dequantize(torch.float64)
            for proj in ("gate_proj", "up_proj", "down_proj")
        )
        return (silu(x @ gate) * (x @ up)) @ down

    total = sum(mlp(sliced, f".rank{rank}") for rank in range(4))
    expected = mlp(whole, "")
    assert isinstance(total, torch.Tensor)
    error = (total - expected).abs().max() / expected.abs().max()
    assert error < 1e-13, error  # sums of 512 in another order


def test_cut_twice_and_merged_are_the_direct_cut(ordinary: Path, tmp_path: Path) -> None:
    two, four = (cut(ordinary, tmp_path / f"tp{tp}", tp) for tp in (2, 4))
    assert same_folders(cut(two, tmp_path / "up", 4), four)
    assert same_folders(cut(four, tmp_path / "down", 2), two)
    one = open_checkpoint(cut(four, tmp_path / "one", 1))
    whole = open_checkpoint(ordinary)
    for name in whole.names():
        prefix, _, field = name.rpartition(".")
        sliced = f"{prefix}.rank0.{field}" if ".mlp.experts." in name else name
        assert torch.equal(one.tensor(sliced), whole.tensor(name)), name
    assert faults(tmp_path / "up", two) == faults(tmp_path / "down", four) == []


def test_tp_that_is_no_multiple(tmp_path: Path) -> None:
    """768 from 2 ranks to 3: rank 1 takes the end of one slice and the start of the next."""
    spec = TinyGlm4Moe(moe_intermediate_size=768, num_experts=1, top_k=1, num_layers=2)
    source = make_ordinary(write_tiny_model(tmp_path / "plain", spec), tmp_path / "whole", 2)
    direct = cut(source, tmp_path / "three", 3)
    again = cut(cut(source, tmp_path / "two", 2), tmp_path / "again", 3)
    assert same_folders(direct, again)


def shared_source(plain: Path, out: Path) -> Path:
    """An ordinary checkpoint whose experts of a layer have the same hidden-side vectors."""

    def encode(weight: torch.Tensor, name: str) -> Exl3Tensor:
        layer, seed = int(name.split(".")[2]), sum(map(ord, name))
        ins, outs = weight.shape
        tensor = random_exl3(ins, outs, 3, seed=seed, name=name)
        shared = random_exl3(ins, outs, 3, seed=layer)
        field = "svh" if name.endswith("down_proj") else "suh"
        return Exl3Tensor(**tensor.tensors() | {field: getattr(shared, field)}, name=name)

    return make_ordinary(plain, out, 3, encode=encode)


def test_layouts_and_back(plain: Path, tmp_path: Path) -> None:
    source = shared_source(plain, tmp_path / "whole")
    shared = cut(source, tmp_path / "shared", 2, "shared_h")
    assert open_checkpoint(shared).has("model.layers.1.mlp.experts.shared_h.gate_proj.rank1.suh")
    assert faults(shared, source) == []
    own = cut(source, tmp_path / "own", 2)
    assert faults(own, shared) == faults(shared, own) == []
    assert same_folders(cut(shared, tmp_path / "back", 2, "per_expert"), own)
    assert same_folders(cut(own, tmp_path / "again", 2, "shared_h"), shared)
    finer = cut(shared, tmp_path / "finer", 4)
    assert open_checkpoint(finer).config["hybrid_tr3_tail"]["rotation_layout"] == "shared_h_v1"
    assert same_folders(cut(finer, tmp_path / "coarser", 2), shared)


def test_metadata(ordinary: Path, tmp_path: Path) -> None:
    source = open_checkpoint(ordinary).config
    config = open_checkpoint(cut(ordinary, tmp_path / "o", 2)).config
    block, quantization = config["hybrid_tr3_tail"], config["quantization_config"]
    assert (block["tp"], block["bits"], block["k_values"]) == (2, "mixed", [3, 4])
    assert block["moe_layers"] == [1, 2] and block["producer"] == "exl3kit"
    assert quantization == {"quant_method": "exl3", "bits": "mixed", "codebook": "mcg"}
    assert config["source_quantization_config"] == source["quantization_config"]
    changed = {"hybrid_tr3_tail", "quantization_config", "source_quantization_config"}
    assert {k: v for k, v in config.items() if k not in changed} == {
        k: v for k, v in source.items() if k not in changed
    }
    table = json.loads((tmp_path / "o" / "tier_bitmap.json").read_text())
    assert table == {str(layer): {"k": list(MIXED_BITS)} for layer in (1, 2)}


def test_rank_sliced_metadata_survives(ordinary: Path, tmp_path: Path) -> None:
    first = cut(ordinary, tmp_path / "two", 2)
    config = json.loads((first / "config.json").read_text())
    config["hybrid_tr3_tail"]["bits_avg"] = 3.33
    config["text_config"] = {"hybrid_tr3_tail": config["hybrid_tr3_tail"]}
    (first / "config.json").write_text(json.dumps(config))
    table = (first / "tier_bitmap.json").read_text().replace("[", "[ ")
    (first / "tier_bitmap.json").write_text(table)
    second = cut(first, tmp_path / "four", 4)
    found = json.loads((second / "config.json").read_text())
    assert found["hybrid_tr3_tail"]["bits_avg"] == 3.33 and found["hybrid_tr3_tail"]["tp"] == 4
    assert found["text_config"]["hybrid_tr3_tail"] == found["hybrid_tr3_tail"]
    assert found["quantization_config"] == config["quantization_config"]
    assert (second / "tier_bitmap.json").read_text() == table


def test_shim_excludes_no_cut_expert(ordinary: Path, tmp_path: Path) -> None:
    from fnmatch import fnmatch

    slice_checkpoint(ordinary, tmp_path / "o", SliceOptions(2, shim="modelopt"))
    checkpoint = open_checkpoint(tmp_path / "o")
    quantization = checkpoint.config["quantization_config"]
    assert (quantization["quant_method"], checkpoint.dialect) == ("modelopt", "rank-sliced")
    patterns = quantization["exclude_modules"]
    for name in checkpoint.names():
        module = name.rpartition(".")[0]
        is_excluded = any(fnmatch(module, pattern) for pattern in patterns)
        assert is_excluded != (".mlp.experts." in name), name


def test_headers_without_padding(ordinary: Path, tmp_path: Path) -> None:
    """exllamav3 writes tensors back to back after an unpadded header: data at odd addresses."""
    odd = Path(shutil.copytree(ordinary, tmp_path / "odd"))
    (shard,) = odd.glob("*.safetensors")
    data = shard.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].rstrip()
    header += b" " * (1 - len(header) % 2)
    shard.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    assert len(header) % 2
    direct = cut(ordinary, tmp_path / "direct", 2)
    assert same_folders(cut(odd, tmp_path / "o", 2), direct)


def test_experts_that_stay_plain_are_copied(plain: Path, ordinary: Path, tmp_path: Path) -> None:
    """A BF16 next-token layer behind EXL3 layers."""
    dense = open_checkpoint(plain)
    head = "model.layers.2.mlp.experts."

    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(head)]:
            del tensors[name]
        tensors |= {n: dense.tensor(n) for n in dense.names() if n.startswith(head)}

    source = rewrite(ordinary, tmp_path / "mixed", change)
    slice_checkpoint(source, tmp_path / "o", SliceOptions(2, shim="modelopt"))
    config = open_checkpoint(tmp_path / "o").config
    assert config["hybrid_tr3_tail"]["moe_layers"] == [1, 1]
    assert "model.layers.2*" in config["quantization_config"]["exclude_modules"]
    assert faults(tmp_path / "o", source) == []


@pytest.mark.parametrize("name", MOE_TYPES)
def test_every_architecture(tmp_path: Path, name: str) -> None:
    """Files as exllamav3 writes them, next-token layers and quantised head included."""
    config = tiny_config_of(name, num_experts=2, mtp_layers=1 if name in MTP_TYPES else 0)
    source = write_ordinary(tmp_path / "m", config, OrdinaryOptions(3, "mcg", num_shards=2))
    cut(source, tmp_path / "o", 2)
    assert faults(tmp_path / "o", source) == []


_KILLED = """
import os, signal, sys
import exl3kit.checkpoint.stream as stream
import exl3kit.checkpoint.writer as writer
from exl3kit.slicing.job import slice_checkpoint
from exl3kit.slicing.plan import SliceOptions, plan_slice

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[3] == "shard":
    stream.os.fsync = die
else:
    keep = writer.write_file
    writer.write_file = lambda path, data: die() if path.name == sys.argv[3] else keep(path, data)
slice_checkpoint(sys.argv[1], sys.argv[2], SliceOptions(2))
"""


@pytest.mark.parametrize("moment", ["shard", "config.json"])
def test_killed_slice_is_no_model_and_the_next_starts_clean(
    ordinary: Path, tmp_path: Path, moment: str
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", _KILLED, str(ordinary), str(out), moment]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert (out / UNFINISHED_NAME).exists() and not (out / "config.json").exists()
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        open_checkpoint(out)
    cut(ordinary, out, 4)
    assert same_folders(out, cut(ordinary, tmp_path / "clean", 4))


def test_full_disk_leaves_nothing(
    ordinary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, calls = os.fsync, []

    def no_space(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 1:  # the folder itself could still be made
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(CheckpointError, match=r"out: disk full .*bytes are free"):
        cut(ordinary, tmp_path / "out", 2)
    assert list((tmp_path / "out").iterdir()) == []


def test_side_file_that_cannot_be_read_is_seen_before_the_weights(
    ordinary: Path, tmp_path: Path
) -> None:
    """Not after 300 GB of them."""
    source = rewrite(ordinary, tmp_path / "m")
    (source / "tokenizer.json").unlink(missing_ok=True)
    (source / "tokenizer.json").symlink_to("/proc/self/mem")  # a file whose first byte is none
    steps: list[int] = []
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot read"):
        slice_checkpoint(
            source, tmp_path / "o", SliceOptions(2), lambda done, _: steps.append(done)
        )
    assert steps == [] and list((tmp_path / "o").iterdir()) == []


def test_too_little_disk_is_seen_before_writing(
    ordinary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs about \d+ bytes of disk, 1000 are free"):
        cut(ordinary, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["per_expert", "shared_h"])
def test_size_of_the_output_is_known_beforehand(
    plain: Path, tmp_path: Path, layout: Literal["per_expert", "shared_h"]
) -> None:
    source = open_checkpoint(shared_source(plain, tmp_path / "whole"))
    plan = plan_slice(source, SliceOptions(4, layout))
    assert plan.num_bytes == sum(tensor.nbytes for tensor in plan.tensors())


def test_progress_and_report(ordinary: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = slice_checkpoint(
        ordinary, tmp_path / "o", SliceOptions(2), lambda *step: seen.append(step)
    )
    checkpoint = open_checkpoint(tmp_path / "o")
    assert seen[-1] == (report.num_bytes, report.num_bytes)
    assert report.num_bytes == sum(info.nbytes for info in checkpoint.infos.values())
    assert report.num_slices == 2 * EXPERTS * 3 * 2
    assert report.num_copied == sum(".experts." not in name for name in checkpoint.names())


def test_source_truncated_under_our_feet(
    ordinary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file shrinks after its header was read."""
    import exl3kit.slicing.job as job

    source = Path(shutil.copytree(ordinary, tmp_path / "source"))
    (shard,) = source.glob("*.safetensors")
    monkeypatch.setattr(job, "check_free_space", lambda *_: os.truncate(shard, 100_000))
    with pytest.raises(CheckpointError, match=rf"{shard}: truncated: tensor "):
        cut(source, tmp_path / "out", 2)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name",
    [f"{EXPERT}.gate_proj.svh", f"{EXPERT}.down_proj.svh", "model.layers.0.mlp.down_proj.suh"],
)
def test_scales_that_are_not_finite_are_not_copied(
    ordinary: Path, tmp_path: Path, name: str, bad: float
) -> None:
    """Of a cut side, of a side that every rank has whole, and of a linear that is not cut."""

    def poison(tensors: Tensors) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name][65] = bad

    source = rewrite(ordinary, tmp_path / "source", poison)
    with pytest.raises(CheckpointError, match=rf"{name}.*expected finite scales, got {bad} at 65"):
        cut(source, tmp_path / "out", 2)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("change", ["touched", "grown", "gone", "new"])
def test_source_that_changes_while_it_is_read(
    ordinary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """After the last byte was read: what was written may be of two versions."""
    source = Path(shutil.copytree(ordinary, tmp_path / "source"))
    (shard,) = source.glob("*.safetensors")
    copy, texts = CheckpointWriter.copy, {
        "touched": "was written to",
        "grown": rf"had {shard.stat().st_size} bytes, now {shard.stat().st_size + 1}",
        "gone": "is gone",
        "new": "more.safetensors is new",
    }  # fmt: skip

    def meanwhile(*arguments: Any) -> None:
        copy(*arguments)
        if change == "touched":
            os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
        elif change == "grown":
            os.truncate(shard, shard.stat().st_size + 1)
        elif change == "gone":
            shard.unlink()
        else:
            (source / "more.safetensors").touch()

    monkeypatch.setattr(CheckpointWriter, "copy", meanwhile)
    with pytest.raises(CheckpointError, match=rf"{source}: .*{texts[change]}; start again"):
        cut(source, tmp_path / "out", 2)
    assert list((tmp_path / "out").iterdir()) == []
