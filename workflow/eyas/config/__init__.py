"""Typed configuration. Importing it costs pydantic and PyYAML, nothing heavier."""

from eyas.config.load import check_config, read_config
from eyas.config.schema import Config, Drafter, Evaluation, PromptFiles, PromptSet, Training, identity
from eyas.config.target_checks import TargetSizes, check_against_target, default_layers, read_target_sizes

__all__ = [
    "Config",
    "Drafter",
    "Evaluation",
    "PromptFiles",
    "PromptSet",
    "TargetSizes",
    "Training",
    "check_against_target",
    "check_config",
    "default_layers",
    "identity",
    "read_config",
    "read_target_sizes",
]
