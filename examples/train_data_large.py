"""Fetch and tokenise the text of a 100 M parameter model: manuals, prose and a dictionary.

    python examples/train_data_large.py --work .train --out .train/large

Beside train_data.py's prose this takes whole manuals with their code, as written, from Debian 12
packages, some of them under the GPL: the text is for training and measuring, not for committing.
Written to OUT: train.npy.xz and held_out.npy.xz (uint16 tokens, documents ended by <|endoftext|>),
the tokenizer's files, calibration.txt from the training documents, held_out.txt, and sources.json
(package, licence, digest, bytes of text taken). One document in fifty, by the digest of its name,
is held out whole.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from train_data import (
    DOC,
    SOURCES,
    WORDNET,
    Document,
    Source,
    fetch,
    read_documents,
    sample_text,
    save_tokens,
    train_tokenizer,
    write_tokenizer,
)
from wordnet_chat import is_held_out

VOCAB_SIZE = 16_000  # 125 x 128; a (vocabulary, 512) table in fp16 stays below 16 MiB
HELD_OUT_BYTES, CALIBRATION_BYTES = 600_000, 1_500_000
PAGE_CHARS = 20_000  # of the dictionary, one document
LONG_PARAGRAPH = 80  # characters from which on a repeated paragraph is dropped

KERNEL = f"{DOC}/linux-doc-6.1/Documentation"
MANUALS = [
    Source("linux-doc-6.1", "deb", "GPL-2.0", (f"{KERNEL}/**/*.rst.gz",)),
    Source("python3.11-doc", "deb", "PSF-2.0", (f"{DOC}/python3.11/html/_sources/**/*.rst.txt",)),
    Source("perl-doc", "deb", "GPL-1+ or Artistic", ("usr/share/perl/5.36.0/pod/*.pod",)),
    Source("anarchism", "deb", "GPL-2+", (f"{DOC}/anarchism/markdown/*.md*",)),
]
HANDBOOK = Source(
    "debian-handbook",
    "deb",
    "GPL-2+ or CC-BY-SA-3.0",
    (f"{DOC}/debian-handbook/html/en-US/*.html",),
)
DICTIONARY = Source("dict-gcide", "deb", "GPL-1+", ("usr/share/dictd/gcide.dict.dz",))
PROSE = [s for s in SOURCES if s not in (WORDNET,) and s.package != "python3.11-doc"] + [HANDBOOK]


def read_plain(path: Path) -> str:
    """The text of a file that may be compressed."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    return raw.decode("utf-8", errors="replace")


def read_manuals(source: Source, folder: Path, seen: set[bytes]) -> Iterator[Document]:
    """Whole files, translations left out; a long paragraph met before in any package is dropped."""
    for path in sorted({p for pattern in source.patterns for p in folder.glob(pattern)}):
        if "translations" in path.parts:
            continue
        kept = []
        for paragraph in re.split(r"\n\s*\n", read_plain(path)):
            digest = sha256(paragraph.encode()).digest()[:12]
            if len(paragraph) < LONG_PARAGRAPH or digest not in seen:
                kept.append(paragraph)
            seen.add(digest)
        text = "\n\n".join(kept)
        if len(text) > 300:
            yield Document(f"{source.package}/{path.relative_to(folder)}", text)


def read_dictionary(source: Source, folder: Path) -> Iterator[Document]:
    """Pages of about PAGE_CHARS, cut between entries."""
    entries = re.split(r"\n\n(?=\S)", read_plain(folder / source.patterns[0]))
    page: list[str] = []
    number = size = 0
    for entry in entries:
        page.append(entry)
        size += len(entry)
        if size >= PAGE_CHARS:
            yield Document(f"{source.package}/{number}", "\n\n".join(page))
            page, size, number = [], 0, number + 1


def gather(work: Path) -> tuple[list[Document], list[dict[str, object]]]:
    """Fetch and read every source: (documents, one manifest row a source)."""
    seen: set[bytes] = set()
    documents: list[Document] = []
    manifest: list[dict[str, object]] = []
    for source in [*MANUALS, *PROSE, DICTIONARY]:
        archive, folder = fetch(source, work)
        if source in MANUALS:
            found = list(read_manuals(source, folder, seen))
        elif source is DICTIONARY:
            found = list(read_dictionary(source, folder))
        else:
            found = list(read_documents(source, folder, seen))
        documents += found
        size = sum(len(d.text) for d in found)
        row = {"archive": archive.name, "sha256": sha256(archive.read_bytes()).hexdigest()}
        about = {"package": source.package, "licence": source.licence}
        manifest.append({**about, **row, "documents": len(found), "text_bytes": size})
        print(f"{source.package}: {len(found)} documents, {size / 1e6:.2f} MB", flush=True)
    return documents, manifest


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Prepare the text of a 100 M parameter model.")
    parser.add_argument("--work", type=Path, required=True, help="downloads and unpacked packages")
    parser.add_argument("--out", type=Path, required=True, help="folder for tokens and texts")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)

    documents, manifest = gather(args.work)
    parts = {
        name: [d.text for d in documents if is_held_out(d.key) == held]
        for name, held in (("train", False), ("held_out", True))
    }
    texts = rng.sample(parts["train"], len(parts["train"]))
    tokenizer = train_tokenizer(iter(texts[::3]), VOCAB_SIZE)
    write_tokenizer(tokenizer, args.out)
    for name, some in parts.items():
        mixed = rng.sample(some, len(some))
        count = save_tokens(tokenizer, mixed, args.out / f"{name}.npy.xz")
        print(f"{name}: {len(mixed)} documents, {count / 1e6:.2f} M tokens", flush=True)
    (args.out / "sources.json").write_text(json.dumps(manifest, indent=2) + "\n")
    for name, part, size in (
        ("held_out", "held_out", HELD_OUT_BYTES),
        ("calibration", "train", CALIBRATION_BYTES),
    ):
        (args.out / f"{name}.txt").write_text(sample_text(parts[part], size, rng))


if __name__ == "__main__":
    main()
