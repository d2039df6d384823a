"""Text from a checkpoint by transformers' own `generate`, streamed and timed."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import exl3kit.integrations.transformers  # noqa: F401  registers the format
from exl3kit.checkpoint.open import read_config
from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.integrations.transformers import compat
from exl3kit.runtime.checks import check_device


@dataclass(frozen=True)
class Timing:
    """One run: tokens read and written, and the seconds to the first and from it to the last."""

    prompt_tokens: int
    new_tokens: int
    prompt_seconds: float
    decode_seconds: float

    @property
    def prompt_speed(self) -> float:
        """Tokens a second of the prompt, up to the first new token."""
        return self.prompt_tokens / self.prompt_seconds

    @property
    def decode_speed(self) -> float:
        """Tokens a second after the first one; 0 if there are no others."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 else 0.0


class TimedStreamer(compat.TextStreamer):
    """Hands text on piece by piece; `times` has the clock at the prompt and at every token."""

    def __init__(self, tokenizer: Any, emit: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.emit = emit
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt, before it is read, and with each new token."""
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with text that later tokens cannot change."""
        self.emit(text)


class Generator:
    """A model with its tokenizer, ready to answer."""

    def __init__(self, path: Path, dtype: str = "auto", device: str = "cpu") -> None:
        """Load the checkpoint folder; `dtype` is a name in torch or `auto`, that of config.json.

        CheckpointError for a folder without config or tokenizer, UnsupportedError for a device
        that is not there, and what loading refuses.
        """
        read_config(path)
        check_device(device)
        compat.disable_progress_bar()
        try:
            self.tokenizer: Any = compat.AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: no tokenizer can be read: {error}") from None
        loaded: Any = compat.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self.model: Any = loaded.to(device)

    def encode(self, prompt: str, is_raw: bool = False) -> torch.Tensor:
        """Token ids (1, T) of a user's turn in the chat template, or of the bare text.

        Bare is also what a tokenizer without a template gives.
        """
        if is_raw or self.tokenizer.chat_template is None:
            return self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        turns = [{"role": "user", "content": prompt}]
        return self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]

    def run(
        self,
        ids: torch.Tensor,
        max_tokens: int,
        temperature: float = 0.0,
        emit: Callable[[str], object] = lambda text: None,
        is_full_length: bool = False,
    ) -> Timing:
        """Answer `ids` (1, T), calling `emit` with each piece of text as soon as it is certain.

        Temperature 0 takes the likeliest token. `is_full_length` goes on after an end token.
        UnsupportedError if prompt and answer do not fit the model's positions.
        """
        self._check_length(ids.shape[1], max_tokens)
        sampling = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if temperature > 0:
            top_k = self.model.generation_config.top_k or 0  # unset, transformers takes 50
            sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k}
        stream = TimedStreamer(self.tokenizer, emit)
        ids = ids.to(self.model.device)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens if is_full_length else None,
            pad_token_id=self.tokenizer.pad_token_id or 0,
            streamer=stream,
            **sampling,
        )
        start, first, *_ = times = stream.times
        return Timing(ids.shape[1], len(times) - 1, first - start, times[-1] - first)

    def bench(self, ids: torch.Tensor, max_tokens: int, runs: int) -> list[Timing]:
        """Timings of `runs` answers of exactly `max_tokens`; let a first answer warm up."""
        return [self.run(ids, max_tokens, is_full_length=True) for _ in range(runs)]

    def peak_bytes(self) -> int:
        """Most memory used so far: on the GPU by torch, else resident in the process."""
        if self.model.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.model.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux

    def _check_length(self, prompt_tokens: int, max_tokens: int) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if prompt_tokens < 1:
            raise UnsupportedError("prompt: expected at least one token, got none")
        if limit is not None and prompt_tokens + max_tokens > limit:
            raise UnsupportedError(
                f"prompt and answer: expected at most {limit} tokens, the model's positions, got "
                f"{prompt_tokens} + {max_tokens}; lower --max-tokens or shorten the prompt"
            )


def median(timings: list[Timing], speed: str) -> tuple[float, float, float]:
    """Median, lowest and highest of a speed, the name of a property of `Timing`."""
    values = [getattr(timing, speed) for timing in timings]
    return statistics.median(values), min(values), max(values)
