"""The configuration. Its defaults are those of the DAPO paper (arXiv 2503.14476, Section 4.1)."""

from dapo_runner.config.commands import ConvertConfig, SftConfig, SftDataConfig, StudyConfig, VariantConfig
from dapo_runner.config.data import ArithmeticConfig, ColumnsConfig, DataConfig, EvalSetConfig, ReasoningGymTask
from dapo_runner.config.reading import apply_overrides, check_config, dump_config, load_config, parse, read_recipe
from dapo_runner.config.reward import (
    AuxiliaryModel,
    CallsConfig,
    JudgeConfig,
    JudgePrompt,
    OverlongConfig,
    RewardConfig,
    RewardKLConfig,
    RewardPart,
)
from dapo_runner.config.rollout import (
    CorrectionConfig,
    CurriculumConfig,
    EnvironmentConfig,
    EvaluationConfig,
    RolloutConfig,
    SamplerConfig,
    ServerConfig,
    VLLMConfig,
)
from dapo_runner.config.run import EarlyStopConfig, LoggingConfig, RolloutLogConfig, RunConfig
from dapo_runner.config.section import failures, flatten, lay_over, lay_settings
from dapo_runner.config.settings import Config, cautions, check_schedule, resolved
from dapo_runner.config.training import (
    AdvantageConfig,
    CriticConfig,
    DistillationConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PreferenceConfig,
    SegmentsConfig,
    TinyModelConfig,
    TreeShape,
    WarmupConfig,
)
from dapo_runner.errors import ConfigError

__all__ = [
    "AdvantageConfig", "ArithmeticConfig", "AuxiliaryModel", "CallsConfig", "ColumnsConfig", "Config", "ConfigError",
    "ConvertConfig", "CorrectionConfig", "CriticConfig", "CurriculumConfig", "DataConfig", "DistillationConfig",
    "EarlyStopConfig", "EnvironmentConfig", "EvalSetConfig", "EvaluationConfig", "JudgeConfig", "JudgePrompt",
    "LoggingConfig", "LoraConfig", "LossConfig", "ModelConfig", "OptimizerConfig", "OverlongConfig", "ParallelConfig",
    "PreferenceConfig", "ReasoningGymTask", "RewardConfig", "RewardKLConfig", "RewardPart", "RolloutConfig",
    "RolloutLogConfig", "RunConfig", "SamplerConfig", "SegmentsConfig", "ServerConfig", "SftConfig", "SftDataConfig",
    "StudyConfig", "TinyModelConfig", "TreeShape", "VLLMConfig", "VariantConfig", "WarmupConfig", "apply_overrides",
    "cautions", "check_config", "check_schedule", "dump_config", "failures", "flatten", "lay_over", "lay_settings",
    "load_config", "parse", "read_recipe", "resolved",
]  # fmt: skip
