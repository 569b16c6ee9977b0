"""Read prompt files, number their records as rows and cut them into shards."""

import json
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.config.schema import PromptFiles
    from eyas.conversations import expand, write_prompts
    from eyas.errors import EyasError

    try:
        patterns = [PromptFiles.model_validate(file) for file in json.loads(args.files)]
    except (ValueError, TypeError) as exc:
        problem = " ".join(str(exc).split())[:300]
        raise EyasError(f'--files: write a JSON list of {{"path", "format", "source"}} ({problem})') from None
    files = expand(patterns, lambda path: False)  # what a rule fetches is there by now
    write_prompts(
        files, args.rows, args.shard_rows, args.max_bad_rows, args.output.parent, args.format, args.duplicates
    )


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument(
        "--files", required=True, help='files or patterns in order: JSON [{"path", "format", "source"}, …]'
    )
    parser.add_argument("--format", default="auto", choices=["auto", "messages", "sharegpt", "prompt", "text"],
                        help="what the records of files without a format look like")  # fmt: skip
    parser.add_argument("--duplicates", default="skip", choices=["skip", "keep"], help="records seen before")
    parser.add_argument("--rows", type=int, required=True, help="rows to take")
    parser.add_argument("--shard-rows", type=int, required=True, help="rows in a shard")
    parser.add_argument("--max-bad-rows", type=int, default=0, help="unusable records to tolerate")
    parser.add_argument("--output", type=Path, required=True, help="index.json; the shards go beside it")
    run_job(parser, work)
