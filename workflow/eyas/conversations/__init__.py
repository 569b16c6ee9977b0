"""Prompt files to numbered rows: JSON lines, JSON or Parquet; OpenAI messages, ShareGPT, prompts, ready text."""

from eyas.conversations.prompts import count_records, write_prompts
from eyas.conversations.rows import Row, read_rows, write_rows
from eyas.conversations.sources import expand

__all__ = ["Row", "count_records", "expand", "read_rows", "write_prompts", "write_rows"]
