"""Write the table of what a run made."""

import json
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.summary import write_summary

    write_summary(args.manifest.parent.parent, json.loads(args.drafters), args.output)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--manifest", type=Path, required=True, help="data_config.json, in the run's folder")
    parser.add_argument("--drafters", required=True, help="JSON: name -> [epochs, draft vocabulary size]")
    parser.add_argument("--output", type=Path, required=True, help="summary.json; summary.txt goes beside it")
    run_job(parser, work)
