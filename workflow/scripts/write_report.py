"""Write the page that shows what a run made."""

import json
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.config import check_config
    from eyas.plan import RunPlan
    from eyas.report import write_report

    config = check_config(json.loads(args.config), "--config")
    write_report(RunPlan(config, args.rows, ()), json.loads(args.benchmarks), args.output)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--config", required=True, help="JSON: the run's configuration")
    parser.add_argument("--rows", type=int, required=True, help="rows of the run")
    parser.add_argument("--benchmarks", default="{}", help="JSON: rule -> pattern of its benchmark files")
    parser.add_argument("--output", type=Path, required=True, help="report.html")
    run_job(parser, work)
