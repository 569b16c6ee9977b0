"""What every script does: arguments, a log that people can read, progress, clear errors."""

from eyas.jobs.launch import launch
from eyas.jobs.memory import keep_freed_memory
from eyas.jobs.nodes import Meeting, spread
from eyas.jobs.progress import BatchProgress, Progress
from eyas.jobs.script import job_parser, run_job

__all__ = ["BatchProgress", "Meeting", "Progress", "job_parser", "keep_freed_memory", "launch", "run_job", "spread"]
