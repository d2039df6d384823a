"""Turn WordNet into short question and answer pairs about words.

A model of ten million parameters speaks best inside a narrow, clean distribution; WordNet's
glosses give one: every answer is one or two plain sentences. A pair is written in the chat form
of the demo model's template,

    <|user|>What is a lighthouse?<|assistant|>A lighthouse is a tower with a light that ...

The database files are described by `man 5 wndb`. Pairs are held out by synset, not by phrasing.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

END = "<|endoftext|>"
POS_FILES = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
UNFIT = re.compile(
    r"slur|offensive|obscen|disparag|derogat|vulgar|sexual|genital|prostitut|\brape|\bpenis|copulat|excre|genus",
)
LEMMA = re.compile(r"^[a-z]{2,}(?:[ '-][a-z]+){0,2}$")
SOUNDS_AN = re.compile(r"^(?:[aeio]|u(?!ni|se|su|ti|ro|r[aei])|hour|honest|hono|heir)")
SOUNDS_A = re.compile(r"^(?:one|once|eu|ewe)")
STARTS_NOUN = re.compile(r"(?:an?|any|someone|one|the) ")
STARTS_ABSTRACT = re.compile(
    r"the (?:act|action|quality|state|condition|process|property|activity|practice|science|study|"
    r"ability|branch) "
)
PLAIN = re.compile(r"^[A-Za-z ,;:'\-.!?]+$")


@dataclass(frozen=True)
class Synset:
    """One meaning; links are (pointer symbol, key of the other synset)."""

    key: str
    pos: str
    words: tuple[str, ...]
    definition: str
    examples: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Pair:
    """A question and its answer; `key` names the synset that the answer speaks of."""

    question: str
    answer: str
    key: str


def read_synsets(folder: Path) -> dict[str, Synset]:
    """Parse data.{noun,verb,adj,adv}; a key is the part of speech and the file offset."""
    synsets = {}
    for pos, name in POS_FILES.items():
        for line in (folder / f"data.{name}").read_text("latin-1").splitlines():
            if not line.startswith(" "):
                synset = _parse_synset(line, pos)
                synsets[synset.key] = synset
    return synsets


def _parse_synset(line: str, pos: str) -> Synset:
    data, _, gloss = line.partition("|")
    field = data.split()
    count = int(field[3], 16)
    words = [re.sub(r"\(\w+\)$", "", w).replace("_", " ") for w in field[4 : 4 + 2 * count : 2]]
    at = 4 + 2 * count
    links = []
    for i in range(int(field[at])):
        symbol, offset, kind, _ = field[at + 1 + 4 * i : at + 5 + 4 * i]
        links.append((symbol, kind.replace("s", "a") + offset))
    definition = re.split("[;:]", re.sub(r"\s*\([^)]*\)\s*", " ", gloss.split('"')[0]))[0].strip(
        " ,."
    )
    examples = tuple(re.findall(r'"([^"]+)"', gloss))
    return Synset(pos + field[0], pos, tuple(words), definition, examples, tuple(links))


def read_senses(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Lemma -> part of speech -> synset keys, the most frequent sense first (index files)."""
    senses: dict[str, dict[str, list[str]]] = {}
    for pos, name in POS_FILES.items():
        for line in (folder / f"index.{name}").read_text("latin-1").splitlines():
            if not line.startswith(" "):
                field = line.split()
                keys = [pos + offset for offset in field[-int(field[2]) :]]
                senses.setdefault(field[0].replace("_", " "), {})[pos] = keys
    return senses


def read_tag_counts(folder: Path) -> Counter[tuple[str, str]]:
    """(lemma, part of speech) -> how often its senses were tagged in WordNet's concordance."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in (folder / "cntlist.rev").read_text("latin-1").splitlines():
        sense_key, _, count = line.split()
        lemma, _, rest = sense_key.partition("%")
        counts[lemma.replace("_", " "), "nvara"[int(rest[0]) - 1]] += int(count)
    return counts


def with_article(noun: str) -> str:
    """`a` or `an` before the noun, by its first sound as far as its spelling shows it."""
    is_an = SOUNDS_AN.match(noun) and not SOUNDS_A.match(noun)
    return f"{'an' if is_an else 'a'} {noun}"


def join_words(words: list[str], conjunction: str) -> str:
    """`a`, `a and b`, `a, b and c`."""
    head, last = words[:-1], words[-1]
    return f"{', '.join(head)} {conjunction} {last}" if head else last


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


class WordNetChat:
    """Generates the pairs; the counts of words and of words after a/an come from the prose."""

    def __init__(
        self, folder: Path, word_counts: Counter[str], article_counts: Counter[str], seed: int = 0
    ):
        self.synsets = read_synsets(folder)
        self.senses = read_senses(folder)
        self.tags = read_tag_counts(folder)
        self.word_counts, self.article_counts = word_counts, article_counts
        self.gloss_counts = Counter(
            word for s in self.synsets.values() for word in re.findall("[a-z]+", s.definition)
        )
        self.random = random.Random(seed)

    def pairs(self) -> Iterator[Pair]:
        """All pairs, lemma by lemma. Common words get more phrasings: they are what people ask for.

        Common is a word that other glosses use or that WordNet's concordance has.
        """
        for lemma, by_pos in sorted(self.senses.items()):
            if not LEMMA.match(lemma):
                continue
            pos = max(
                by_pos, key=lambda p: self.tags[lemma, p] + {"n": 2.5, "v": 1.5, "a": 1}.get(p, 0)
            )
            clean = [self.synsets[k] for k in by_pos[pos] if self._is_clean(lemma, self.synsets[k])]
            if clean and clean[0].key == by_pos[pos][0]:
                yield from self._about(lemma, clean)

    def _is_clean(self, lemma: str, synset: Synset) -> bool:
        """Plain and decent, and the lemma (lower case in the index) is not a name in lower case."""
        d = synset.definition
        is_plain = 12 <= len(d) <= 160 and PLAIN.match(d) and d[0].islower()
        return bool(
            is_plain and lemma in synset.words and not UNFIT.search(d + " ".join(synset.words))
        )

    def _is_mass(self, noun: str) -> bool:
        last = noun.split()[-1]
        seen = self.word_counts[last]
        return self._is_plural(noun) or (seen >= 5 and self.article_counts[last] < 0.02 * seen)

    def _about(self, lemma: str, senses: list[Synset]) -> Iterator[Pair]:
        synset = senses[0]
        seen = self.gloss_counts[lemma] + 2 * self.tags[lemma, synset.pos]
        if " " in lemma and not seen:
            return
        phrasings = 6 if seen >= 4 else 3 if seen else 1
        subject, answer = self._definition(lemma, synset)
        for question in self.random.sample(self._questions(lemma, subject), phrasings):
            yield Pair(self._casual(question), answer, synset.key)
        if phrasings > 1:
            relations = self._relations(lemma, subject, senses)
            yield from (Pair(self._casual(q), a, synset.key) for q, a in relations)

    def _definition(self, lemma: str, synset: Synset) -> tuple[str, str]:
        """(subject of the question, answer): `a lighthouse`, `A lighthouse is a tower ...`."""
        text, plural = synset.definition, self._is_plural(lemma)
        if synset.pos == "v":
            return f"to {lemma}", f"To {lemma} is to {text}."
        if synset.pos in "ar" or not STARTS_NOUN.match(text):
            return lemma, f"The word {lemma} means {text}."
        is_bare = STARTS_ABSTRACT.match(text) or self._is_mass(lemma)
        subject = lemma if is_bare else with_article(lemma)
        answer = f"{capital(subject)} {'are' if plural else 'is'} {text}."
        others = [w for w in synset.words if w != lemma and LEMMA.match(w)][:2]
        if others:
            names = others if is_bare else [with_article(w) for w in others]
            answer += f" {'They are' if plural else 'It is'} also called {join_words(names, 'or')}."
        return subject, answer

    def _is_plural(self, noun: str) -> bool:
        return noun.endswith("s") and not noun.endswith(("ss", "us", "is"))

    def _questions(self, lemma: str, subject: str) -> list[str]:
        if subject.startswith("to "):
            first = [
                f"What does it mean {subject}?",
                f"What is the meaning of {lemma}?",
                f"What does {lemma} mean?",
            ]
        elif subject == lemma:
            first = [
                f"What is {lemma}?",
                f"What does {lemma} mean?",
                f"What is the meaning of {lemma}?",
            ]
        else:
            first = [f"What is {subject}?", f"What is {subject}?", f"What does {lemma} mean?"]
        last = {
            f"to {lemma}": f"Tell me what it means {subject}.",
            lemma: f"What does the word {lemma} mean?",
        }
        return [
            *first,
            f"Define {lemma}.",
            f"Can you explain the word {lemma}?",
            last.get(subject, f"Tell me what {subject} is."),
        ]

    def _relations(
        self, lemma: str, subject: str, senses: list[Synset]
    ) -> Iterator[tuple[str, str]]:
        synset = senses[0]
        parents = self._linked(synset, ("@",), 1)
        if synset.pos == "n" and parents:
            verb = "are" if self._is_plural(lemma) else "is"
            yield (
                f"What kind of thing {verb} {subject}?",
                f"{capital(subject)} {verb} a kind of {parents[0]}.",
            )
        children = self._linked(synset, ("~",), 3)
        if synset.pos == "n" and len(children) == 3:
            yield (
                f"Name some kinds of {lemma}.",
                f"Some kinds of {lemma} are {join_words(children, 'and')}.",
            )
        parts = self._linked(synset, ("%p",), 3)
        if synset.pos == "n" and parts:
            yield (
                f"What are the parts of {subject}?",
                f"Parts of {subject} are {join_words(parts, 'and')}.",
            )
        opposites = self._linked(synset, ("!",), 1)
        if opposites and synset.words[0] == lemma:
            yield f"What is the opposite of {lemma}?", f"The opposite of {lemma} is {opposites[0]}."
        others = [w for w in synset.words if w != lemma and LEMMA.match(w)]
        if others:
            yield f"What is another word for {lemma}?", f"Another word for {lemma} is {others[0]}."
        example = next(
            (e for e in synset.examples if lemma in e and PLAIN.match(e) and len(e) > 20), None
        )
        if example:
            yield f"Use the word {lemma} in a sentence.", capital(example.strip(" .!?;,")) + "."
        if len(senses) > 1:
            first, second = senses[0].definition, senses[1].definition
            both = f"The word {lemma} can mean {first}. It can also mean {second}."
            yield f"What are the meanings of {lemma}?", both

    def _linked(self, synset: Synset, symbols: tuple[str, ...], count: int) -> list[str]:
        targets = (self.synsets[key].words[0] for symbol, key in synset.links if symbol in symbols)
        return [w for w in targets if LEMMA.match(w)][:count]

    def _casual(self, question: str) -> str:
        """One question in ten without capital and one in ten without its mark, as people type."""
        if self.random.random() < 0.1:
            question = question[0].lower() + question[1:]
        return question[:-1] if self.random.random() < 0.1 else question


def is_held_out(key: str, share: float = 0.02) -> bool:
    """A fixed share of keys, chosen by digest so that the choice does not depend on order."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") < share * 2**32


def conversations(pairs: list[Pair], rng: random.Random) -> Iterator[str]:
    """Chat documents: one in seven holds two pairs, one in twenty begins with a system message."""
    pairs = rng.sample(pairs, len(pairs))
    while pairs:
        turns = [pairs.pop() for _ in range(2 if rng.random() < 0.15 and len(pairs) > 1 else 1)]
        system = "<|system|>You are a helpful dictionary." if rng.random() < 0.05 else ""
        yield system + "".join(f"<|user|>{p.question}<|assistant|>{p.answer}" for p in turns)
