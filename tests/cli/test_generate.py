"""`exl3kit generate` from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exl3kit.cli.app import app

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"


pytestmark = pytest.mark.usefixtures("one_thread")


def answer(runner: CliRunner, *arguments: object) -> str:
    result = runner.invoke(app, ["generate", *map(str, arguments)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refusal(runner: CliRunner, *arguments: object) -> str:
    result = runner.invoke(app, ["generate", *map(str, arguments)])
    assert result.exit_code == 2 and not result.stdout
    return result.stderr


def test_answer_of_the_demo_model(runner: CliRunner) -> None:
    question = "What is a lighthouse?"
    chat = answer(runner, DEMO, question, "--max-tokens", 48)
    assert chat.startswith("A lighthouse is a tower with a light") and chat.endswith("\n")
    raw = answer(runner, DEMO, "The sea", "--max-tokens", 8, "--raw")
    assert raw != answer(runner, DEMO, "The sea", "--max-tokens", 8)


def test_sampling_follows_the_seed(runner: CliRunner) -> None:
    options = (DEMO, "What is a river?", "--max-tokens", 24, "--temperature", 1.5, "--seed")
    assert answer(runner, *options, 3) == answer(runner, *options, 3) != answer(runner, *options, 4)


def test_rank_sliced_checkpoint_and_bench(runner: CliRunner, checkpoint: Path) -> None:
    found = answer(runner, checkpoint, "Hi", "--max-tokens", 4, "--bench", "--dtype", "float32")
    lines = found.splitlines()[-3:]
    assert lines[0].startswith("prompt") and "(5 tokens, median of 5 runs" in lines[0]
    assert lines[1].startswith("decode") and "(4 tokens, median of 5 runs" in lines[1]
    assert lines[2].startswith("memory") and "iB at most" in lines[2]


def test_refusals(runner: CliRunner, checkpoint: Path) -> None:
    assert "found none" in refusal(runner, checkpoint / "nowhere", "Hi")
    assert "1024 tokens" in refusal(runner, DEMO, "Hi", "--max-tokens", 1024)
    assert "use cpu" in refusal(runner, DEMO, "Hi", "--device", "cuda:99")
    assert "expected cpu, cuda" in refusal(runner, DEMO, "Hi", "--device", "abacus")
    for file in checkpoint.glob("token*.json"):
        file.unlink()
    assert "no tokenizer" in refusal(runner, checkpoint, "Hi")


def test_without_transformers() -> None:
    """In a process of its own: a package that is half forgotten would trouble other tests."""
    code = (
        "import sys; sys.modules['transformers'] = None; from exl3kit.cli.app import main; main()"
    )
    command = [sys.executable, "-c", code, "generate", str(DEMO), "Hi"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    assert "expected transformers" in done.stderr and "exl3kit[transformers]" in done.stderr
