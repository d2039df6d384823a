"""Which files of a model go with its weights: what a tokenizer and a licence consist of."""

from __future__ import annotations

from pathlib import Path

from exl3kit.checkpoint.jsonfile import is_bare_name

# Weights, their index and config.json are written by whoever writes the model.
_PATTERNS = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*preprocessor_config.json",
    "LICENSE*",
    "NOTICE*",
)


def side_files(folder: Path) -> dict[str, Path]:
    """Tokenizer, chat template, generation config and licences of a model, by name, sorted.

    Not what a loader would take for weights, and no name that cannot be a line of a list.
    """
    found = {file.name: file for pattern in _PATTERNS for file in folder.glob(pattern)}
    return {
        name: found[name]
        for name in sorted(found)
        if found[name].is_file() and is_bare_name(name) and not name.endswith(".safetensors")
    }
