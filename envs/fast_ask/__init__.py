"""Fast Ask: questions about workbooks, answered through three tools.

Light to import: `envs.fast_ask.env` (which needs the sandbox) is imported by those who run
episodes.
"""

from envs.fast_ask.questions import FAMILIES, KINDS
from envs.fast_ask.tasks import (
    DIFFICULTIES,
    SPLITS,
    StreamConfig,
    Task,
    TaskStream,
    build_workbook,
    make_task,
)

__all__ = [
    "DIFFICULTIES",
    "FAMILIES",
    "KINDS",
    "SPLITS",
    "StreamConfig",
    "Task",
    "TaskStream",
    "build_workbook",
    "make_task",
]
