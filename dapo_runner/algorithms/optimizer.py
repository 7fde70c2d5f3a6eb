"""The trained weights: float32 masters, optimizer, learning rate, and their part of a checkpoint."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dapo_runner.algorithms.mini_batch import MiniBatch
from dapo_runner.config import Config, ConfigError
from dapo_runner.parallel.sharding import add_up_over_replicas, local, whole, whole_until_backward
from dapo_runner.policy.model import Policy

IN_FLIGHT = 2  # gradients on their way to the host while the backward pass computes the next one
SCALE_GROWS_AFTER = 400  # updates without overflow, as in verl; torch's 2000 are most of an RL run


class MasterWeights:
    """Float32 copies of a model's parameters. A float32 parameter is its own master.

    At the learning rates of RL, AdamW moves a bfloat16 weight by less than its rounding. The gradients of micro-batches
    are also summed in float32, where their order has no effect. ``prefix`` starts the names in a checkpoint. With
    ``offload`` each parameter has a master in the host's memory, together with its gradients and optimizer state.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], prefix: str = "", offload: bool = False) -> None:
        self.parameters, self.prefix, self.tensors = parameters, prefix, dict[str, Tensor]()
        self.optimizer: torch.optim.Optimizer | None = None
        self.arriving = deque[tuple[Tensor, Tensor, torch.cuda.Event | None]]()
        for name, parameter in parameters.items():
            self.tensors[name] = parameter
            if offload or parameter.dtype != torch.float32:
                master = parameter.detach().to("cpu" if offload else parameter.device, torch.float32, copy=True)
                self.tensors[name] = master.requires_grad_(parameter.requires_grad)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(self._collect, master))

    def state_of(self, tensor: Tensor) -> dict[str, Tensor]:
        return {} if self.optimizer is None else self.optimizer.state.get(tensor, {})

    def is_finite(self) -> bool:
        """Return whether this rank's weights are finite, as rounded into the model."""
        return all(bool(local(parameter.detach()).isfinite().all()) for parameter in self.parameters.values())

    def gradients(self) -> list[Tensor]:
        """Return the masters that have a gradient, when all gradients have arrived."""
        self.receive()
        return [tensor for tensor in self.tensors.values() if tensor.grad is not None]

    def _collect(self, master: Tensor, parameter: Tensor) -> None:
        """Send a parameter's gradient to its master as soon as the backward pass has computed it, in the model's dtype.

        On its way from a GPU to the host it is in pinned memory, so that the backward pass goes on.
        """
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.device == master.device:
            return self._add(master, gradient)
        there = torch.empty_like(gradient, device=master.device, pin_memory=gradient.is_cuda)
        there.copy_(gradient, non_blocking=True)
        self.arriving.append((master, there, torch.cuda.current_stream().record_event() if gradient.is_cuda else None))
        self.receive(IN_FLIGHT)

    def receive(self, left: int = 0) -> None:
        """Wait for gradients, the oldest first, until at most ``left`` are on their way."""
        while len(self.arriving) > left:
            master, gradient, event = self.arriving.popleft()
            if event is not None:
                event.synchronize()
            self._add(master, gradient)

    def _add(self, master: Tensor, gradient: Tensor) -> None:
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        for name, parameter in self.parameters.items():
            if self.tensors[name] is not parameter:
                parameter.copy_(self.tensors[name])


class TrainedModel:
    """A model, its master weights and their optimizer."""

    def __init__(self, model: Policy, config: Config, prefix: str = "") -> None:
        self.model, self.config = model, config
        settings, named = config.optimizer, model.model.named_parameters()
        trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.master = MasterWeights(trained, prefix, offload=settings.offload)
        options = settings.model_dump(include={"lr", "betas", "eps", "weight_decay"})
        self.optimizer = self.master.optimizer = torch.optim.AdamW(self.master.tensors.values(), fused=True, **options)
        # Scales the loss so that float16 can represent its gradients. Other dtypes need no scale.
        self.scaler = torch.amp.GradScaler(
            model.device.type, growth_interval=SCALE_GROWS_AFTER, enabled=model.compute == torch.float16
        )

    def accumulate_gradients(self, mini: MiniBatch, compute_loss: Callable[[int], Tensor]) -> None:
        """Sum the gradients of ``compute_loss(index)``, a loss times ``mini.loss_scale``, over the micro-batches."""
        self.scaler.scale(torch.zeros((), device=self.model.device))  # the first call creates the scale
        mini.loss_scale = self.scaler.get_scale()
        root, n_micro_batches = self.model.root, len(mini.micro_batches)
        with whole_until_backward(root, not self.config.parallel.reshard_after_forward):
            for index in range(n_micro_batches):
                add_up_over_replicas(root, index == n_micro_batches - 1)
                compute_loss(index).backward()

    def clip_gradients(self) -> Tensor:
        """Unscale the gradients and clip them to `optimizer.grad_clip`. Return their norm before clipping."""
        limit, trained = self.config.optimizer.grad_clip, self.master.gradients()
        self.scaler.unscale_(self.optimizer)
        return whole(torch.nn.utils.clip_grad_norm_(trained, float("inf") if limit is None else limit))

    def step(self, rate: float) -> dict[str, float]:
        """Update the weights with a learning rate and drop the gradients. In float16, return the metrics of the loss
        scale: if a gradient is not finite, the weights stay and the scale is halved.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.master.publish()
        if not self.scaler.is_enabled():
            return {}
        return {"loss_scale": scale, "skipped_updates": float(self.scaler.get_scale() < scale)}


class MovingReference(MasterWeights):
    """A reference that follows the policy: θ_ref ← α·θ_ref + (1 − α)·θ after each step (arXiv 2404.10719).

    The average is in float32: in half precision a change by the factor 1 − α would be rounded away.
    """

    def __init__(self, model: Any, policy: Mapping[str, Tensor], alpha: float, offload: bool = False) -> None:
        """Average ``policy``, float32 by name, sharded like ``model``. Raises ConfigError if they do not match."""
        super().__init__(dict(model.named_parameters()), "reference.", offload=offload)
        self.policy, self.alpha = policy, alpha
        if any(name not in policy or policy[name].shape != tensor.shape for name, tensor in self.tensors.items()):
            raise ConfigError("loss.reference_ema: requires a reference with the policy's parameter names and shapes")

    @torch.no_grad()
    def follow(self) -> None:
        for name, tensor in self.tensors.items():
            tensor.mul_(self.alpha).add_(self.policy[name].detach(), alpha=1 - self.alpha)
        self.publish()


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of the updates in rollout ``step``, counted from 0.

    In a warm-up of w steps (at least one) it rises linearly to `lr`. From there to the last step T = `run.steps` it
    falls with x = (step + 1 − w) / (T − w + 1) and r = `min_lr_ratio`, which it would reach one step after T:

        linear   lr · (r + (1 − r) · (1 − x))
        cosine   lr · (r + (1 − r) · (1 + cos πx) / 2)
    """
    settings, count = config.optimizer, step + 1
    warmup = max(settings.warmup_steps, 1)
    warmed = settings.lr * min(1.0, count / warmup)
    if settings.schedule == "constant" or count <= warmup:
        return warmed
    x = min(1.0, (count - warmup) / (config.run.steps - warmup + 1))
    shape = 1 - x if settings.schedule == "linear" else (1 + math.cos(math.pi * x)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * shape)
