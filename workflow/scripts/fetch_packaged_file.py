"""Take one file from a PyPI package, checked by its sha256."""

from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.target.packages import fetch_packaged_file

    fetch_packaged_file(args.package, args.archive, args.member, args.sha256, args.output)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--package", required=True, help="name==version")
    parser.add_argument("--archive", choices=["wheel", "sdist"], default="wheel", help="which archive carries the file")
    parser.add_argument("--member", required=True, help="path of the file inside the package's archive")
    parser.add_argument("--sha256", required=True, help="the file's checksum")
    parser.add_argument("--output", type=Path, required=True, help="where to put the file")
    run_job(parser, work)
