"""What a run's data are made of, and the page that shows what a run made."""

from eyas.report.page import write_report
from eyas.report.statistics import collect, write_statistics

__all__ = ["collect", "write_report", "write_statistics"]
