"""Prompt files to numbered rows: OpenAI messages, ShareGPT, plain prompts."""

from eyas.conversations.prompts import count_records, write_prompts
from eyas.conversations.rows import Row, read_rows, write_rows

__all__ = ["Row", "count_records", "read_rows", "write_prompts", "write_rows"]
