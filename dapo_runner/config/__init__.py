"""The configuration: typed sections that refuse unknown keys, one YAML file, `key=value` overrides.

The defaults are the DAPO paper's (arXiv 2503.14476, Section 4.1), so a recipe states only where it departs
from it.
"""

from dapo_runner.config.advantage import AdvantageConfig, SegmentsConfig, TreeShape
from dapo_runner.config.checks import cautions
from dapo_runner.config.convert import ConvertConfig
from dapo_runner.config.data import ArithmeticConfig, ColumnsConfig, DataConfig, EvalSetConfig
from dapo_runner.config.judge import AskedModel, JudgeConfig, JudgePrompt
from dapo_runner.config.logging import LoggingConfig, RolloutLogConfig
from dapo_runner.config.model import LoraConfig, ModelConfig, TinyModelConfig, WarmupConfig
from dapo_runner.config.optimizer import OptimizerConfig
from dapo_runner.config.preference import PreferenceConfig
from dapo_runner.config.reading import (
    apply_overrides,
    check_config,
    dump_config,
    flatten,
    lay_settings,
    load_config,
    load_sft_config,
    load_study,
    parse,
    parse_config,
    read_recipe,
)
from dapo_runner.config.reward import OverlongConfig, RewardConfig, RewardKLConfig
from dapo_runner.config.rollout import CorrectionConfig, RolloutConfig
from dapo_runner.config.run import RunConfig
from dapo_runner.config.sampler import CurriculumConfig, SamplerConfig
from dapo_runner.config.sampling import EvaluationConfig
from dapo_runner.config.settings import Config, resolved
from dapo_runner.config.sft import SftColumnsConfig, SftConfig, SftDataConfig
from dapo_runner.config.study import FigureConfig, StudyConfig, VariantConfig
from dapo_runner.errors import ConfigError

__all__ = [
    "AdvantageConfig",
    "ArithmeticConfig",
    "AskedModel",
    "ColumnsConfig",
    "Config",
    "ConfigError",
    "ConvertConfig",
    "CorrectionConfig",
    "CurriculumConfig",
    "DataConfig",
    "EvalSetConfig",
    "EvaluationConfig",
    "FigureConfig",
    "JudgeConfig",
    "JudgePrompt",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "PreferenceConfig",
    "RewardConfig",
    "RewardKLConfig",
    "RolloutConfig",
    "RolloutLogConfig",
    "RunConfig",
    "SamplerConfig",
    "SegmentsConfig",
    "SftColumnsConfig",
    "SftConfig",
    "SftDataConfig",
    "StudyConfig",
    "TinyModelConfig",
    "TreeShape",
    "VariantConfig",
    "WarmupConfig",
    "apply_overrides",
    "cautions",
    "check_config",
    "dump_config",
    "flatten",
    "lay_settings",
    "load_config",
    "load_sft_config",
    "load_study",
    "parse",
    "parse_config",
    "read_recipe",
    "resolved",
]
