"""What a run consists of, from its configuration alone. Imports no torch: the Snakefile reads this."""

from eyas.plan.record import begin_record, end_record, read_record, target_width
from eyas.plan.run import RunPlan, plan_run
from eyas.plan.scripts import prepare_environment
from eyas.plan.slurm_executor import remember_min_job_age
from eyas.plan.stale_lock import WorkingFolder, is_dry_run

__all__ = [
    "RunPlan",
    "WorkingFolder",
    "begin_record",
    "end_record",
    "is_dry_run",
    "plan_run",
    "prepare_environment",
    "read_record",
    "remember_min_job_age",
    "target_width",
]
