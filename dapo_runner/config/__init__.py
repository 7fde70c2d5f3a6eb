"""The configuration: typed sections that refuse unknown keys, one YAML file, `key=value` overrides.

The defaults are the DAPO paper's (arXiv 2503.14476, Section 4.1), so a recipe states only where it departs
from it.
"""

from dapo_runner.config.checks import cautions
from dapo_runner.config.reading import apply_overrides, dump_config, load_config, parse_config
from dapo_runner.config.settings import (
    AdvantageConfig,
    ArithmeticConfig,
    Config,
    CorrectionConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    OverlongConfig,
    ParallelConfig,
    ProbeConfig,
    RewardConfig,
    RolloutConfig,
    RolloutLogConfig,
    RunConfig,
    SamplerConfig,
    TinyModelConfig,
    VLLMConfig,
    WandbConfig,
    WarmupConfig,
)
from dapo_runner.errors import ConfigError

__all__ = [
    "AdvantageConfig",
    "ArithmeticConfig",
    "Config",
    "ConfigError",
    "CorrectionConfig",
    "DataConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "ParallelConfig",
    "ProbeConfig",
    "RewardConfig",
    "RolloutConfig",
    "RolloutLogConfig",
    "RunConfig",
    "SamplerConfig",
    "TinyModelConfig",
    "VLLMConfig",
    "WandbConfig",
    "WarmupConfig",
    "apply_overrides",
    "cautions",
    "dump_config",
    "load_config",
    "parse_config",
]
