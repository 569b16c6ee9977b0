"""Make self_instructions.jsonl: prompts that the target itself comes up with.

An instruction-tuned model that is given its chat template up to the words of the user goes on with what users say
(Magpie, Xu et al. 2024, section 2.1). Such prompts are of the kind that the target was tuned on, and there are as many
as one likes. Kept are those that end, in ASCII, of 3 to 80 words, decent, each once, and none that MT-bench asks too.

    python config/prompts/make_self_instructions.py TARGET MT_BENCH [--tries 4000] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
from eyas.decoding.prompt_sets import file_questions, normalised
from eyas.regeneration.generate import Sampling, generate
from eyas.shards.files import write_text
from eyas.target.chat import ChatTemplate
from eyas.target.model import load_target
from eyas.target.tokenizer import TargetReference, end_of_turn_ids, load_tokenizer
from rich.progress import track

FILE = Path(__file__).with_name("self_instructions.jsonl")
BATCH = 100
UNWANTED = re.compile(r"\b(fuck|shit|nigg|rap(e|ed|ist)s?\b|suicid|porn|nazi)", re.IGNORECASE)
SAMPLING = Sampling(max_new_tokens=80, temperature=1.0, top_p=0.95, seed=0)


def opening(chat: ChatTemplate) -> list[int]:
    """The ids of a chat up to where the user's words begin."""
    text = chat.render_prepared([{"role": "user", "content": "\ue000"}]).split("\ue000")[0]
    return list(chat.tokenizer.encode(text, add_special_tokens=False))


def kept(text: str) -> bool:
    words = len(text.split())
    return text.isascii() and text.isprintable() and 3 <= words <= 80 and not UNWANTED.search(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder of the target")
    parser.add_argument("mt_bench", help="prompts that are left out, in a format that Eyas reads")
    parser.add_argument("--tries", type=int, default=4000, help="prompts sampled (4000); three in four are kept")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    reference = TargetReference(args.target)
    tokenizer = load_tokenizer(reference)
    prompt, ends = opening(ChatTemplate(tokenizer)), end_of_turn_ids(reference, tokenizer)
    target = load_target(reference)
    seen = {normalised(question.text) for question in file_questions(args.mt_bench, "auto")}
    lines = []
    for start in track(range(0, args.tries, BATCH), "Sampling prompts"):
        keys = range(start, min(start + BATCH, args.tries))
        for reply in generate(target, [prompt] * len(keys), ends, SAMPLING, keys):
            text = tokenizer.decode(reply.ids, skip_special_tokens=True).strip()
            if reply.finish == "stop" and kept(text) and normalised(text) not in seen:
                seen.add(normalised(text))
                lines.append(json.dumps({"prompt": text}) + "\n")
    write_text(FILE, "".join(lines))
    print(f"{FILE}: {len(lines)} of {args.tries} prompts are kept.")


if __name__ == "__main__":
    main()
