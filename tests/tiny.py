"""A tiny target, trained in seconds on a small synthetic language, and what goes with it.

The language has one chain of words: asked about a word, the target says the words that
follow it in the chain and stops at the last one. A drafter has real structure to learn.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SYLLABLES = ["ba", "do", "ki", "lu", "me", "no", "pa", "ri", "so", "tu", "va", "ze"]
WORDS = [a + b for a in SYLLABLES for b in SYLLABLES[:3]]  # 36 words, one chain
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def question(start: int) -> str:
    return f"what follows {WORDS[start]} ?"


def answer(start: int, length: int = 14) -> str:
    return " ".join(WORDS[start + 1 : start + 1 + length])


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = (
        [question(i) for i in range(len(WORDS))]
        + [answer(i, 99) for i in range(len(WORDS))]
        + ["user assistant system"]
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(vocab_size: int, **changes: object) -> LlamaConfig:
    values: dict = dict(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaConfig(**(values | changes))


def make_target(folder: Path, steps: int = 250, seed: int = 0, **changes: object) -> Path:
    """Train the tiny target and save it, with its tokenizer, as a transformers folder; `changes`: of its sizes."""
    tokenizer = make_tokenizer()
    random.seed(seed)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(len(tokenizer), **changes))
    rows = []
    for start in range(len(WORDS) - 1):
        messages = [{"role": "user", "content": question(start)}, {"role": "assistant", "content": answer(start)}]
        rows.append(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20, (steps - step) / (0.3 * steps))
        pick = torch.randint(len(rows), (16,))
        loss = model(input_ids=ids[pick], labels=labels[pick]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts_file(path: Path, count: int) -> Path:
    """`count` prompts of the language as JSONL."""
    with open(path, "w", encoding="utf-8") as file:
        for i in range(count):
            file.write(json.dumps({"prompt": question(i * 7 % (len(WORDS) - 1))}) + "\n")
    return path
