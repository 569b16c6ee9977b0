"""Hand one job to Kubernetes: fill in job.yaml, and print the name of the job that `kubectl create` made of it."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from string import Template

VARIABLES = {
    "image": "EYAS_K8S_IMAGE", "claim": "EYAS_K8S_CLAIM", "mount": "EYAS_K8S_MOUNT",
}  # fmt: skip

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rule", required=True)
parser.add_argument("--threads", type=int, required=True)
parser.add_argument("--gpu", type=int, required=True)
parser.add_argument("--memory-mb", type=int, required=True)
parser.add_argument("--minutes", type=int, required=True)
parser.add_argument("jobscript", type=Path)
args = parser.parse_args()
missing = [variable for variable in VARIABLES.values() if not os.environ.get(variable)]
if missing:
    sys.exit(f"error: {', '.join(missing)} must be set: profiles/kubernetes/config.yaml shows how")
mount = Path(os.environ["EYAS_K8S_MOUNT"])
if not args.jobscript.resolve().is_relative_to(mount.resolve()):
    sys.exit(f"error: {args.jobscript.parent} is not below {mount} (EYAS_K8S_MOUNT): pods would not find it")
rule = re.sub("[^a-z0-9]+", "-", args.rule.lower()).strip("-")[:40]
values = {name: os.environ[variable] for name, variable in VARIABLES.items()} | {
    "name": f"eyas-{rule}-", "rule": rule, "jobscript": args.jobscript.resolve(), "threads": args.threads,
    "gpu": args.gpu, "memory_mb": args.memory_mb, "seconds": 60 * args.minutes,
}  # fmt: skip
job = Template(Path(__file__).with_name("job.yaml").read_text(encoding="utf-8")).substitute(values)
created = subprocess.run(
    ["kubectl", "create", "-f", "-", "-o", "jsonpath={.metadata.name}"], input=job, text=True, stdout=subprocess.PIPE
)
print(created.stdout)
sys.exit(created.returncode)
