"""What a run is doing, from signals that do not depend on each other. Reads only; imports no torch."""

from eyas.status.collect import Status, collect, find_status_run

__all__ = ["Status", "collect", "find_status_run"]
