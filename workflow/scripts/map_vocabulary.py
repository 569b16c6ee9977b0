"""Count supervised tokens and choose the draft vocabulary."""

from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.shards import shard_files
    from eyas.target.tokenizer import TargetReference, end_of_turn_ids, load_tokenizer, text_config
    from eyas.vocabulary.mapping import write_map

    target = TargetReference.from_json(args.target)
    tokenizer = load_tokenizer(target)
    write_map(
        shard_files(args.tokens_folder, args.rows, args.shard_rows),
        int(text_config(target).vocab_size),
        args.draft_vocab_size,
        args.held_out_every,
        end_of_turn_ids(target, tokenizer),
        sorted(set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}),
        args.output,
    )


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--tokens-folder", type=Path, required=True, help="folder of the token shards")
    parser.add_argument("--rows", type=int, required=True, help="rows of the run")
    parser.add_argument("--shard-rows", type=int, required=True, help="rows in a shard")
    parser.add_argument("--held-out-every", type=int, required=True, help="every n-th row is not counted")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code")
    parser.add_argument("--draft-vocab-size", type=int, required=True, help="tokens the drafter can propose")
    parser.add_argument("--output", type=Path, required=True, help="the map (.safetensors)")
    run_job(parser, work)
