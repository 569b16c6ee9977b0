"""Write the page that shows what a run made."""

from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.report import write_report

    write_report(args.summary, args.statistics, args.vocabularies, args.output)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--summary", type=Path, required=True, help="summary.json")
    parser.add_argument("--statistics", type=Path, required=True, help="tokens/statistics.json")
    parser.add_argument("--vocabularies", type=Path, nargs="+", required=True, help="sidecars of the vocabulary maps")
    parser.add_argument("--output", type=Path, required=True, help="report.html")
    run_job(parser, work)
