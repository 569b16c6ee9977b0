"""What the data benchmarks run on: seeded conversations, the tokenizer that is trained on such text, token shards."""

from __future__ import annotations

import hashlib
import math
import random
import tempfile
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
TEMPLATE = HERE.parent / "tests" / "templates" / "qwen3.jinja"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = 30_000
TOKENIZER_SIZE = 32_000
# How Llama-3 and Qwen cut text into words.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Conversation = list[dict[str, str]]


def word_list() -> list[str]:
    """WORDS different words, the short ones first; one in twenty has an accent."""
    choice = random.Random(0)
    onsets, vowels, codas = [*"bcdfghklmnprstvw", "st", "tr", "ch", "pl"], "aeiou", ["", "", *"nrsl"]
    found: dict[str, None] = {}
    while len(found) < WORDS:
        syllables = (
            choice.choice(onsets) + choice.choice(vowels) + choice.choice(codas) for _ in range(choice.randint(1, 4))
        )
        word = "".join(syllables)
        found.setdefault(word.replace("e", "é", 1) if choice.random() < 0.12 else word)
    return sorted(found, key=lambda word: (len(word), word))


class Writer:
    """Text of words with Zipf's frequencies: sentences and lists, now and then code or another script."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._words = word_list()
        self._shares = list(accumulate(1 / rank for rank in range(1, WORDS + 1)))

    def words(self, count: int) -> list[str]:
        return self.random.choices(self._words, cum_weights=self._shares, k=count)

    def sentence(self) -> str:
        words = self.words(self.random.randint(4, 18))
        words[0] = words[0].capitalize()
        for place in range(len(words) - 1):
            if self.random.random() < 0.08:
                words[place] += self.random.choice(",;:")
        if self.random.random() < 0.15:
            words.insert(1, str(self.random.randrange(5000)))
        return " ".join(words) + self.random.choice((".", ".", ".", "?", "!", "..."))

    def code(self) -> str:
        lines = []
        for depth in range(self.random.randint(1, 3)):
            a, b, c, d = self.words(4)
            number, indent = self.random.randrange(10_000), "    " * depth
            lines += [
                f"{indent}for {a} in {b}({number}):",
                f"{indent}    {a}_{c}[{number % 7}] += '{d}'  # {number:#x}",
            ]
        return "```python\n" + "\n".join(lines) + "\n```"

    def other_script(self) -> str:
        """Six words of Chinese, Cyrillic or Greek letters, or of emoji."""
        scripts = ((0x4E00, 400, 12), (0x430, 32, 9), (0x3B1, 25, 9), (0x1F600, 40, 2))
        base, size, longest = self.random.choice(scripts)
        return " ".join(
            "".join(chr(base + int(self.random.random() ** 2 * size)) for _ in range(self.random.randint(1, longest)))
            for _ in range(6)
        )

    def message(self, mean_words: float) -> str:
        """Paragraphs of lognormal length."""
        wanted = self.random.lognormvariate(math.log(mean_words) - 0.32, 0.8)
        pieces, written = [self.sentence()], 10
        while written < wanted:
            kind = self.random.random()
            if kind < 0.06:
                pieces += ["\n\n", self.code(), "\n\n"]
            elif kind < 0.10:
                pieces += [" ", self.other_script(), "."]
            elif kind < 0.25:
                pieces += ["\n- ", self.sentence()]
            elif kind < 0.35:
                pieces += ["\n\n", self.sentence()]
            else:
                pieces += [" ", self.sentence()]
            written += 11
        return "".join(pieces).strip()

    def conversation(self) -> Conversation:
        """Two questions and two answers, about 300 tokens."""
        return [
            {"role": role, "content": self.message(mean)}
            for role, mean in (("user", 22.0), ("assistant", 55.0), ("user", 18.0), ("assistant", 55.0))
        ]


def conversations(count: int, seed: int = 0) -> list[Conversation]:
    writer = Writer(seed)
    return [writer.conversation() for _ in range(count)]


def train_tokenizer() -> Any:
    """A byte-level BPE of TOKENIZER_SIZE entries for such text, with Qwen3's chat template and control tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    sample = conversations(4_000, seed=1)
    frame = ["user\nassistant\nsystem\n"] * 1_000  # words that every such tokenizer knows
    tokenizer.train_from_iterator([*frame, *(message["content"] for c in sample for message in c)], trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=TEMPLATE.read_text(encoding="utf-8"), clean_up_tokenization_spaces=False,
    )  # fmt: skip


def tokenizer_folder() -> Path:
    """A folder with that tokenizer, trained once and kept in the temp folder until this file changes."""
    key = hashlib.sha256(Path(__file__).read_bytes() + TEMPLATE.read_bytes() + version("transformers").encode())
    folder = Path(tempfile.gettempdir()) / f"eyas-benchmark-tokenizer-{key.hexdigest()[:16]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as staging:
            train_tokenizer().save_pretrained(Path(staging) / "tokenizer")
            try:
                (Path(staging) / "tokenizer").rename(folder)  # in one step: what is there is whole
            except OSError:
                if not folder.exists():
                    raise  # else another process was first
    return folder


def token_arrays(tokens: int, vocab_size: int, sequence: int = 512) -> dict[str, np.ndarray]:
    """A tokens shard's arrays: ids about as frequent as words are, the second half of every sequence supervised."""
    generator = np.random.default_rng(0)
    ids, by_rank = np.empty(tokens, np.int32), generator.permutation(vocab_size).astype(np.int32)
    for start in range(0, tokens, 10**7):
        part = ids[start : start + 10**7]
        rank = np.exp(generator.random(len(part), np.float32) * np.float32(np.log(vocab_size))).astype(np.int32)
        part[:] = by_rank[np.minimum(rank, vocab_size) - 1]  # log-uniform ranks: frequency ~ 1 / rank
    offsets = np.append(np.arange(0, tokens, sequence), tokens)
    mask = (np.arange(tokens, dtype=np.int32) % sequence >= sequence // 2).astype(np.uint8)
    return {"input_ids": ids, "loss_mask": mask, "offsets": offsets, "row_ids": np.arange(len(offsets) - 1)}
