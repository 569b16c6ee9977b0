"""Choose the best epoch by the held-out rows."""

from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.drafter.stages import select_best

    folder = args.output.parent
    select_best(folder.parent / f"epoch_{args.last_epoch}", folder)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--last-epoch", type=int, required=True, help="the last epoch that may be chosen")
    parser.add_argument("--output", type=Path, required=True, help="selection.json; the drafter goes beside it")
    run_job(parser, work)
