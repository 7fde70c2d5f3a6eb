"""Settings of several processes."""

from __future__ import annotations

from pydantic import model_validator

from dapo_runner.config.section import PositiveFloat, PositiveInt, Section


class ParallelConfig(Section):
    """How the processes that torchrun starts, one for each GPU, share a run."""

    gpus: PositiveInt = 1  # processes; 1: as many as the launcher starts. --dry-run and --simulate plan with it
    replicate: PositiveInt = 1  # copies of the weights, each sharded over gpus / replicate (HSDP)
    reshard_after_forward: bool = True  # False: layers stay whole from forward to backward
    sequence: PositiveInt = 1  # GPUs that share the positions of one micro-batch
    rollout_tensor: PositiveInt = 1  # GPUs that share one copy of the rollout engine's weights
    timeout: PositiveFloat = 1800.0  # seconds that a rank waits for another, such as for its rollouts

    @model_validator(mode="after")
    def _groups_divide_gpus(self) -> ParallelConfig:
        for name in ("sequence", "rollout_tensor", "replicate"):
            if self.gpus > 1 and self.gpus % getattr(self, name):
                raise ValueError(f"{name}: expected a divisor of gpus={self.gpus}, got {getattr(self, name)}")
        return self
