"""Dynamic sampling (DAPO, section 3.2) for TRL's ``GRPOTrainer``: groups that cannot train are replaced.

A group is the ``num_generations`` completions of one prompt. If its rewards are all equal, its advantages are all 0.
One batch of TRL is collected in rounds. In every round TRL gets new prompts, generates, scores and rewards as usual.
Groups whose rewards vary are accepted, in the order of their prompts. Surplus groups train in the next batch, with the
log-probs of the policy that sampled them.

TRL gathers the rewards, so that all ranks know all groups and decide the same. All ranks then get the rows of accepted
groups, and each takes its share of the batch. What a round returns per completion (C tokens) is kept without padding,
on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback
from transformers.utils import logging
from trl.trainer.utils import pad, use_adapter

logger = logging.get_logger(__name__)

STATE_FILE = "dynamic_sampling.pt"
ON_EXHAUSTED = ("error", "train_partial")

Row = dict[str, Tensor]
Generate = Callable[[list[dict[str, Any]]], dict[str, Tensor]]

_PROMPT = ("prompt_ids", "prompt_mask")
# Their padding values. Padding is not read, but TRL pads the mask of a tool with 1.
_COMPLETION = {
    "completion_ids": 0,
    "completion_mask": 0,
    "old_per_token_logps": 0,
    "ref_per_token_logps": 0,
    "sampling_per_token_logps": 0,
    "importance_sampling_ratio": 1,
    "advantages": 0,
    "tool_mask": 1,
}
_OF_BATCH = ("num_items_in_batch",)  # counted again
_OLD, _REF = "old_per_token_logps", "ref_per_token_logps"


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """Return the tokens that train, [B, C]: no tokens of a tool, and none of a truncated completion that TRL masks."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


class Group(NamedTuple):
    """The completions of one prompt."""

    prompt: int  # its index in the dataset
    rows: list[Row]


class PromptOrder:
    """Indices of a dataset in the order of TRL's ``RepeatSampler``: shuffled again in every epoch, from one seed.

    Unlike there, no prompt is left out if the dataset is not a multiple of the batch.
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.drawn = 0  # over all epochs; the only state
        self._epoch, self._order = -1, list(range(size))

    def take(self, n: int) -> list[int]:
        taken = [self._at(self.drawn + i) for i in range(n)]
        self.drawn += n
        return taken

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self.size)
        if self.shuffle and epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed)
            for _ in range(epoch + 1):
                order = torch.randperm(self.size, generator=generator)
            self._epoch, self._order = epoch, order.tolist()
        return self._order[place]


@dataclass
class Counts:
    """Counts since the last log."""

    batches: int = 0
    rounds: int = 0
    generated: int = 0
    accepted: int = 0
    used: int = 0


class DynamicSampler:
    """Collect the generation batches of a trainer.

    Args:
        trainer: a ``GRPOTrainer`` after its constructor.
        max_rounds: generation rounds per batch.
        on_exhausted: what follows after these rounds: ``"error"``, or ``"train_partial"``: the batch is filled with
            groups whose completions are masked and count in no token mean.
        n_judged: number of reward functions, the first ones, that decide whether a group varies.

    Raises:
        ValueError: a setting is not supported; the message says why.
    """

    def __init__(self, trainer: Any, max_rounds: int, on_exhausted: str, n_judged: int) -> None:
        _check(trainer, max_rounds, on_exhausted)
        args, accelerator = trainer.args, trainer.accelerator
        self.trainer, self.max_rounds, self.on_exhausted, self.n_judged = trainer, max_rounds, on_exhausted, n_judged
        self.generations: int = trainer.num_generations
        self.rank, self.ranks = accelerator.process_index, accelerator.num_processes
        self.needed: int = args.generation_batch_size // self.generations
        # Rounds are multiples of this many groups, so that their rows divide evenly over the ranks.
        self.unit = self.ranks // math.gcd(self.generations, self.ranks)
        self.order = PromptOrder(len(trainer.train_dataset), args.seed, trainer.shuffle_dataset)
        self.surplus: list[Group] = []
        self.share = 1.0  # of groups accepted recently
        self.counts = Counts()
        self._rewards: Tensor | None = None
        self._lengths: list[int] = []

    def observe(self, rewards: Tensor, completion_ids: Sequence[Sequence[int]]) -> None:
        """Record the rewards of a round, [completions of all ranks, functions], and this rank's completions."""
        self._rewards, self._lengths = rewards, [len(ids) for ids in completion_ids]

    def collect(self, generate: Generate, columns: Sequence[str]) -> dict[str, Tensor]:
        """Return a generation batch of groups with varying rewards, like TRL's ``_generate_and_score_completions``.

        Args:
            generate: that method of TRL, for one round.
            columns: those of the dataset that TRL gets.

        Raises:
            RuntimeError: ``max_rounds`` rounds did not fill the batch.
            ValueError: TRL returned something that cannot be moved to another batch, such as images.
        """
        accepted, spare = list(self.surplus), list[Group]()
        rounds = 0
        while len(accepted) < self.needed and rounds < self.max_rounds:
            missing = self.needed - len(accepted)
            indices = self.order.take(self._round_size(missing))
            output = generate(self._inputs(indices, columns))
            if unknown := output.keys() - {*_PROMPT, *_COMPLETION, *_OF_BATCH}:
                name = type(self.trainer).__name__
                raise ValueError(f"{name}: dynamic_sampling is not supported with {', '.join(sorted(unknown))}")
            rounds += 1
            varies = self._vary(output)
            self.share = (self.share + sum(varies) / len(varies)) / 2
            self._count(rounds=1, generated=len(varies), accepted=sum(varies))
            if not accepted and len(varies) == sum(varies) == self.needed:  # TRL's own batch
                self._count(batches=1, used=self.needed)
                return output
            has_surplus = sum(varies) > missing and _OLD not in output
            if has_surplus:  # it trains after its policy has changed
                output[_OLD] = self._old_logprobs(output)
            partial = self.on_exhausted == "train_partial"
            groups = self._groups(output, indices, [partial or chosen for chosen in varies])
            chosen = [group for group, kept in zip(groups, varies, strict=True) if kept and group]
            for group in chosen[:missing] if has_surplus else []:  # train with the policy that sampled them
                for row in group.rows:
                    del row[_OLD]
            accepted += chosen
            spare = [group for group, kept in zip(groups, varies, strict=True) if not kept and group]
        used = min(len(accepted), self.needed)
        if used < self.needed:
            accepted += self._fill(used, spare, rounds)
        selected, self.surplus = accepted[: self.needed], accepted[self.needed :]
        self._count(batches=1, used=used)
        return self._batch(selected)

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        counts, self.counts = self.counts, Counts()
        if counts.batches == 0:
            return {}
        values = {
            "accepted_share": counts.accepted / counts.generated if counts.generated else math.nan,
            "rounds": counts.rounds / counts.batches,
            "groups_generated": counts.generated,
            "groups_used": counts.used,
            "groups_carried_over": len(self.surplus),
        }
        return {f"dynamic_sampling/{name}": float(value) for name, value in values.items()}

    def save(self, folder: Path) -> None:
        surplus = [group._asdict() for group in self.surplus]
        state = {"drawn": self.order.drawn, "prompts": self.order.size, "share": self.share, "surplus": surplus}
        torch.save(state, folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Resume from a checkpoint.

        Raises:
            ValueError: the checkpoint is from another number of prompts, or holds groups of another size.
        """
        if not (folder / STATE_FILE).exists():
            logger.warning(f"{folder} has no {STATE_FILE}: dynamic sampling starts at the first prompt")
            return
        state = torch.load(folder / STATE_FILE, weights_only=True)
        if state["prompts"] != self.order.size:
            raise ValueError(
                f"resume_from_checkpoint: {folder} requires a train_dataset of {state['prompts']} prompts, got "
                f"{self.order.size}"
            )
        surplus = [Group(**group) for group in state["surplus"]]
        if surplus and (size := len(surplus[0].rows)) != self.generations:
            raise ValueError(
                f"resume_from_checkpoint: {folder} holds groups of {size} completions that have not trained, got "
                f"num_generations={self.generations}. Set num_generations={size}"
            )
        self.order.drawn, self.share, self.surplus = state["drawn"], state["share"], surplus

    def _count(self, **more: int) -> None:
        for name, value in more.items():
            setattr(self.counts, name, getattr(self.counts, name) + value)

    def _round_size(self, missing: int) -> int:
        """Return the number of groups expected to fill the batch at the current acceptance rate, at most a batch."""
        expected = math.ceil(missing / max(self.share, missing / self.needed))
        return min(self.needed, math.ceil(expected / self.unit) * self.unit)

    def _inputs(self, indices: list[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return this rank's rows of a round: each prompt ``num_generations`` times, split evenly over ranks."""
        here = len(indices) * self.generations // self.ranks
        rows = range(self.rank * here, (self.rank + 1) * here)
        dataset = self.trainer.train_dataset
        examples = [dataset[indices[row // self.generations]] for row in rows]
        return [{name: example[name] for name in columns} for example in examples]

    def _vary(self, output: dict[str, Tensor]) -> list[bool]:
        """Return for every group of the round, over all ranks, whether its rewards vary and a token of it trains."""
        assert self._rewards is not None
        weights = self.trainer.reward_weights[: self.n_judged].to(self._rewards.device)
        judged = self._rewards[:, : self.n_judged]
        rewards = (judged * weights).nansum(1).view(-1, self.generations)
        unscorable = judged.isnan().all(1).view(-1, self.generations)  # no function scored it
        lowest = rewards.masked_fill(unscorable, math.inf).amin(1)
        tokens = self.trainer.accelerator.gather(loss_mask(output).sum(1)).view(-1, self.generations).sum(1)
        highest = rewards.masked_fill(unscorable, -math.inf).amax(1)
        rounding = torch.isclose(highest, lowest, rtol=1e-6)  # of sums in another order
        varies: list[bool] = ((highest > lowest) & ~rounding & (tokens > 0)).tolist()
        return varies

    def _old_logprobs(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return those of the current policy."""
        return self._logprobs(self.trainer.model, inputs)

    def _reference_logprobs(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return those of TRL's reference: a model, or the policy without its adapter or with its first one."""
        trainer = self.trainer
        if trainer.ref_model is not None:
            return self._logprobs(trainer.ref_model, inputs)
        adapted = trainer.accelerator.unwrap_model(trainer.model)
        with use_adapter(adapted, adapter_name="ref" if "ref" in adapted.peft_config else None):
            return self._logprobs(trainer.model, inputs)

    def _logprobs(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Return log-probs of the completions under a model, [B, C]. All ranks must call it."""
        ids, mask = (
            torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
        )
        trainer, width = self.trainer, inputs["completion_ids"].shape[1]
        with torch.no_grad():
            logprobs, _, _ = trainer._get_per_token_logps_and_entropies(
                model, ids, mask, width, batch_size=trainer.args.per_device_train_batch_size
            )
        return logprobs

    def _groups(self, output: dict[str, Tensor], indices: list[int], keep: list[bool]) -> list[Group | None]:
        """Return the groups of a round to keep, whole, on every rank; ``None`` for the others."""
        host = {name: value.cpu() for name, value in output.items() if name not in _OF_BATCH and value is not None}
        first = self.rank * len(self._lengths)
        here = [
            (first + i, self._row(host, i)) for i in range(len(self._lengths)) if keep[(first + i) // self.generations]
        ]
        rows = dict(gather_object(here))
        starts = range(0, len(indices) * self.generations, self.generations)
        return [
            Group(index, [rows[start + i] for i in range(self.generations)]) if chosen else None
            for index, start, chosen in zip(indices, starts, keep, strict=True)
        ]

    def _row(self, host: dict[str, Tensor], i: int) -> Row:
        n_prompt, n = int(host["prompt_mask"][i].sum()), self._lengths[i]
        row = {}
        for name, value in host.items():
            if name in _PROMPT:
                row[name] = value[i, value.shape[1] - n_prompt :].clone()
            else:
                whole = value.dim() == 1 or self._is_per_sequence(name)
                row[name] = (value[i] if whole else value[i, :n]).clone()
        return row

    def _is_per_sequence(self, name: str) -> bool:
        return name == "importance_sampling_ratio" and "sequence" in self.trainer.vllm_importance_sampling_mode

    def _fill(self, used: int, spare: list[Group], rounds: int) -> list[Group]:
        """Return groups without a token that trains, to fill the batch."""
        if self.on_exhausted == "error" or used == 0:
            raise RuntimeError(
                f"{type(self.trainer).__name__}: max_sampling_rounds={self.max_rounds}: {used} of {self.needed} groups "
                f"have varying rewards after {rounds} rounds; the share accepted recently is {self.share:.1%}. Raise "
                "max_sampling_rounds, use prompts that are neither too easy nor too hard, or set "
                "on_sampling_exhausted='train_partial', which requires one such group"
            )
        return [
            Group(prompt, [row | {"completion_mask": torch.zeros_like(row["completion_mask"])} for row in rows])
            for prompt, rows in spare[: self.needed - used]
        ]

    def _batch(self, groups: list[Group]) -> dict[str, Tensor]:
        """Return this rank's rows of the batch, padded like TRL's."""
        trainer = self.trainer
        rows = [row for group in groups for row in group.rows]
        here = len(rows) // self.ranks
        local = rows[self.rank * here : (self.rank + 1) * here]
        names = rows[0].keys() - {_OLD, _REF}
        if differing := {name for row in rows for name in names ^ (row.keys() - {_OLD, _REF})}:
            raise ValueError(
                f"{type(trainer).__name__}: only some groups of the batch have {', '.join(sorted(differing))}: those "
                "carried over come from another use_vllm or rollout_func. Resume with that of the checkpoint"
            )
        batch = {name: self._padded(name, [row[name] for row in local]) for name in names}
        batch["num_items_in_batch"] = torch.stack([loss_mask(row).sum() for row in rows]).sum()
        batch = {name: value.to(trainer.accelerator.device) for name, value in batch.items()}
        needed = []
        if any(_OLD in row for row in rows):  # groups of an earlier policy: then all rows need old log-probs
            needed.append((_OLD, self._old_logprobs))
        if trainer.beta != 0:  # groups sampled while it was 0 have none
            needed.append((_REF, self._reference_logprobs))
        for name, logprobs in needed:
            if all(name in row for row in rows):
                batch[name] = self._padded(name, [row[name] for row in local]).to(trainer.accelerator.device)
                continue
            batch[name] = logprobs(batch)
            for i, row in enumerate(local):
                if name in row:
                    batch[name][i, : len(row[name])] = row[name].to(batch[name])
        return batch

    def _padded(self, name: str, values: list[Tensor]) -> Tensor:
        if values[0].dim() == 0 or self._is_per_sequence(name):
            return torch.stack(values)
        fill = _COMPLETION.get(name, 0)
        if name in ("prompt_ids", "completion_ids"):
            tokenizer = getattr(self.trainer.processing_class, "tokenizer", self.trainer.processing_class)
            fill = tokenizer.pad_token_id
        return pad(values, fill, "left" if name in _PROMPT else "right", self.trainer.pad_to_multiple_of)


class SaveSampler(TrainerCallback):  # type: ignore[misc]
    """Save the sampler beside TRL's own state at each checkpoint."""

    def __init__(self, sampler: DynamicSampler) -> None:
        self.sampler = sampler

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.should_save:
            self.sampler.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def _check(trainer: Any, max_rounds: Any, on_exhausted: str) -> None:
    name = type(trainer).__name__
    if type(max_rounds) is not int or max_rounds < 1:
        raise ValueError(f"{name}: max_sampling_rounds must be a positive integer, got {max_rounds!r}")
    if on_exhausted not in ON_EXHAUSTED:
        raise ValueError(
            f"{name}: on_sampling_exhausted must be one of {', '.join(ON_EXHAUSTED)}, got {on_exhausted!r}"
        )
    if not hasattr(trainer.train_dataset, "__getitem__") or not hasattr(trainer.train_dataset, "__len__"):
        raise ValueError(
            f"{name}: dynamic_sampling requires a train_dataset with a length and an index, got "
            f"{type(trainer.train_dataset).__name__}: a stream cannot be resumed"
        )
    if trainer.scale_rewards == "batch" or trainer.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"{name}: dynamic_sampling requires scale_rewards='group' or 'none' and "
            "multi_objective_aggregation='sum_then_normalize': the others normalise over a whole generated batch, of "
            "which only a part trains"
        )
