"""What the sections of the configuration are made of.

Fields marked with :func:`runtime` change how fast a stage runs, never what it
writes; they are left out of the rules' ``params`` (see :func:`identity`), so
that changing one re-runs nothing.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=100)]
Dtype = Literal["bfloat16", "float16", "float32"]
StoredDtype = Literal["bfloat16", "float16", "float32", "fp8_e4m3"]
PromptFormat = Literal["auto", "messages", "sharegpt", "prompt", "text"]


def _number(value: Any) -> Any:
    # PyYAML reads `1e-4` (no dot) as a string: take it as the number it is meant to be.
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value):
        return float(value)
    return value


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]


def runtime(default: Any, **constraints: Any) -> Any:
    """A field that cannot change what an artefact is: at most its last bits, by floating-point rounding
    (in greedy decoding a near tie may then fall the other way)."""
    return Field(default, json_schema_extra={"runtime": True}, **constraints)


class Strict(BaseModel):
    # defer_build: the schema is built once, of the whole, and not of each section as well. The fields' docstrings are
    # read for the page on them alone (docs/make_config_page.py): use_attribute_docstrings takes 0.1 s of every job.
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)


class Asked(Strict):
    """A stage whose jobs load a model: what they ask for. Without a scheduler nobody notices the first two."""

    memory_gb: int | None = runtime(None, ge=1)
    """Memory that a job asks of a cluster, in GB on each node; more at each retry. null takes an estimate."""
    hours: Number = runtime(24.0, gt=0)
    """Time limit that a job asks of a cluster; longer at each retry, which goes on where the last one was."""
    threads: int = runtime(1, ge=1)
    """CPU threads of a job."""
    gpu: int = runtime(0, ge=0)
    """GPUs of a job."""

    @property
    def estimated_gb(self) -> float:
        """Memory of a job on the machine's side, for want of a better figure."""
        return 8 + 4 * self.threads + 16 * self.gpu

    def memory_mb(self, attempt: int) -> int:
        return math.ceil(1000 * (self.memory_gb or self.estimated_gb)) * attempt

    def minutes(self, attempt: int) -> int:
        return math.ceil(60 * self.hours) * attempt


def identity(section: Strict, exclude: set[str] | None = None) -> dict[str, Any]:
    """The part of `section` that can change what a stage writes: all but runtime fields."""
    left_out = {
        name
        for name, field in type(section).model_fields.items()
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("runtime")
    }
    values = section.model_dump(mode="json", exclude=left_out | (exclude or set()))
    for name in values:
        if isinstance(getattr(section, name), Strict):
            values[name] = identity(getattr(section, name))
    return values
