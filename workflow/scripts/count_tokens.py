"""Count the tokens of a run: only when all are counted is it known whether the hidden states fit on the disk."""

from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.shards import shard_files
    from eyas.tokenization.totals import write_totals

    write_totals(shard_files(args.tokens_folder, args.rows, args.shard_rows), args.output)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--tokens-folder", type=Path, required=True, help="folder of the token shards")
    parser.add_argument("--rows", type=int, required=True, help="rows of the run")
    parser.add_argument("--shard-rows", type=int, required=True, help="rows in a shard")
    parser.add_argument("--output", type=Path, required=True, help="the totals (JSON)")
    run_job(parser, work)
