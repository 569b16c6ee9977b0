"""Write the model cards of a drafter's exports, and where they come from."""

import json
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.export import describe_exports
    from eyas.target.tokenizer import TargetReference

    target = json.loads(args.target)
    run = args.manifest.parent.parent
    reference = TargetReference.from_json(args.target)
    describe_exports(run, args.drafter, reference, target.get("gguf"), json.loads(args.settings))


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--manifest", type=Path, required=True, help="data_config.json, in the run's folder")
    parser.add_argument("--drafter", required=True, help="name of the drafter")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code, gguf")
    parser.add_argument("--settings", required=True, help="JSON: results, config (fit to be published)")
    run_job(parser, work)
