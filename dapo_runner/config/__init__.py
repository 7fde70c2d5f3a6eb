"""The configuration. Its defaults are those of the DAPO paper (arXiv 2503.14476, Section 4.1)."""

from dapo_runner.config.commands import ConvertConfig, SftConfig, SftDataConfig, StudyConfig, VariantConfig
from dapo_runner.config.data import ArithmeticConfig, ColumnsConfig, DataConfig, EvalSetConfig
from dapo_runner.config.reading import apply_overrides, check_config, dump_config, load_config, parse, read_recipe
from dapo_runner.config.reward import AuxiliaryModel, JudgeConfig, JudgePrompt, OverlongConfig, RewardConfig
from dapo_runner.config.rollout import (
    CorrectionConfig,
    EnvironmentConfig,
    EvaluationConfig,
    RolloutConfig,
    SamplerConfig,
)
from dapo_runner.config.run import LoggingConfig, RolloutLogConfig, RunConfig
from dapo_runner.config.section import failures, flatten, lay_over, lay_settings
from dapo_runner.config.settings import Config, cautions, check_schedule, resolved
from dapo_runner.config.training import (
    AdvantageConfig,
    DistillationConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PreferenceConfig,
    SegmentsConfig,
    TinyModelConfig,
    TreeShape,
    WarmupConfig,
)
from dapo_runner.errors import ConfigError

__all__ = [
    "AdvantageConfig", "ArithmeticConfig", "AuxiliaryModel", "ColumnsConfig", "Config", "ConfigError", "ConvertConfig",
    "CorrectionConfig", "DataConfig", "DistillationConfig", "EnvironmentConfig", "EvalSetConfig", "EvaluationConfig",
    "JudgeConfig", "JudgePrompt", "LoggingConfig", "LoraConfig", "LossConfig", "ModelConfig", "OptimizerConfig",
    "OverlongConfig", "PreferenceConfig", "RewardConfig", "RolloutConfig", "RolloutLogConfig", "RunConfig",
    "SamplerConfig", "SegmentsConfig", "SftConfig", "SftDataConfig", "StudyConfig", "TinyModelConfig", "TreeShape",
    "VariantConfig", "WarmupConfig", "apply_overrides", "cautions", "check_config", "check_schedule", "dump_config",
    "failures", "flatten", "lay_over", "lay_settings", "load_config", "parse", "read_recipe", "resolved",
]  # fmt: skip
