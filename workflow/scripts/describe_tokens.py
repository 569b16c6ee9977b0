"""Describe the tokens of a run: lengths, data sets, skipped rows, bytes of the hidden states to come."""

from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.report.statistics import write_statistics
    from eyas.shards import shard_files
    from eyas.target.tokenizer import TargetReference

    write_statistics(
        shard_files(args.tokens_folder, args.rows, args.shard_rows),
        TargetReference.from_json(args.target),
        args.dtype,
        args.output,
    )


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--tokens-folder", type=Path, required=True, help="folder of the token shards")
    parser.add_argument("--rows", type=int, required=True, help="rows of the run")
    parser.add_argument("--shard-rows", type=int, required=True, help="rows in a shard")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32", "fp8_e4m3"], required=True, help="of the states"
    )
    parser.add_argument("--output", type=Path, required=True, help="the statistics (JSON)")
    run_job(parser, work)
