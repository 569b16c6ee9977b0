"""Read prompt files, number their records as rows and cut them into shards."""

from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.conversations import write_prompts

    write_prompts(args.prompts, args.rows, args.shard_rows, args.max_bad_rows, args.output.parent)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help=".json or .jsonl files, in order")
    parser.add_argument("--rows", type=int, required=True, help="rows to take")
    parser.add_argument("--shard-rows", type=int, required=True, help="rows in a shard")
    parser.add_argument("--max-bad-rows", type=int, default=0, help="unusable records to tolerate")
    parser.add_argument("--output", type=Path, required=True, help="index.json; the shards go beside it")
    run_job(parser, work)
