"""What a run consists of, from its configuration alone. Imports no torch: the Snakefile reads this."""

from eyas.plan.run import RunPlan, plan_run
from eyas.plan.scripts import prepare_environment
from eyas.plan.stale_lock import hold_working_folder

__all__ = ["RunPlan", "hold_working_folder", "plan_run", "prepare_environment"]
