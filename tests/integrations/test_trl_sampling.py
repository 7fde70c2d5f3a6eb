"""``DapoGRPOTrainer(dynamic_sampling=True)``: groups that train all vary; none is lost and none trains twice."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e '.[trl]'")

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from ranks import on_ranks
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_runs import OFF_POLICY, WIDTH, Kept, Run, load, save_tiny_model, train

from dapo_kernels.integrations.trl_sampling import STATE_FILE, PromptOrder

KINDS = ("easy", "mixed", "hard", "mixed", "mixed")
ONE_UPDATE = {"num_generations": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}  # 4 groups
SAMPLING = {"dynamic_sampling": True}

Completion = tuple[int, ...]
Earned = tuple[str, Completion, float | None]


def prompts(kinds: tuple[str, ...] = KINDS, n: int = 25) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [f"{i}+7=" for i in range(n)], "kind": [kinds[i % len(kinds)] for i in range(n)]}
    )


class Ledger:
    """Rollouts that follow from prompt, update and row, so that a run may be repeated or cut; and what they earned.

    ``kind`` of a prompt: its completions are all right, all wrong, right where their first token is even ("mixed"),
    right or not scored ("gaps"), never scored, or each earns something else ("unique"). Completions of a prompt that
    ends with ``cut`` are all truncated.
    """

    __name__ = "ledger"

    def __init__(self, cut: str = "nothing") -> None:
        self.cut = cut
        self.rounds: list[list[Earned]] = []
        self.steps: dict[tuple[Completion, Completion], int] = {}
        self.weights: dict[int, dict[str, Tensor]] = {}

    def generate(self, texts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer, step = trainer.processing_class, trainer.state.global_step
        rank = trainer.accelerator.process_index
        prompt_ids = [tokenizer(text)["input_ids"] for text in texts]
        completions = []
        for i, text in enumerate(texts):
            lots = random.Random(f"{text} {step} {rank * len(texts) + i}")
            shortest = WIDTH if text.endswith(self.cut) else 2
            ids = [lots.randrange(3, len(tokenizer)) for _ in range(lots.randint(shortest, WIDTH))]
            completions.append(ids if len(ids) == WIDTH else [*ids[:-1], tokenizer.eos_token_id])
            self.steps[tuple(prompt_ids[i]), tuple(completions[-1])] = step
        if step not in self.weights:
            self.weights[step] = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    def __call__(self, prompts: list[str], completion_ids: list[list[int]], kind: list[str], **_: Any) -> list[Any]:
        earned: list[Any] = []
        for ids, of in zip(completion_ids, kind, strict=True):
            right = float(ids[0] % 2 == 0)
            kinds = {"easy": 1.0, "hard": 0.0, "none": None, "mixed": right, "gaps": right or None}
            earned.append(kinds.get(of, hash(tuple(ids)) % 997 / 997))
        self.rounds.append([(p, tuple(c), e) for p, c, e in zip(prompts, completion_ids, earned, strict=True)])
        return earned

    def groups(self, size: int = 4) -> list[list[Earned]]:
        return [group for rows in self.rounds for group in by_group(rows, size)]


def run(
    model: Path,
    folder: Path,
    ledger: Ledger,
    trainer_class: type = Kept,
    kinds: tuple[str, ...] = KINDS,
    **options: Any,
) -> Run:
    given = {"reward_funcs": ledger, "rollout_func": ledger.generate, "train_dataset": prompts(kinds)}
    given |= options.pop("trainer_options", SAMPLING)
    settings = {"loss_type": "dapo", "learning_rate": 2.0, "max_steps": 5, **ONE_UPDATE}
    return train(trainer_class, model, folder, ledger, **(settings | options), trainer_options=given)


def completions_of(batch: dict[str, Any]) -> list[Completion]:
    ends = batch["completion_mask"].sum(1).tolist()
    return [tuple(ids[:end].tolist()) for ids, end in zip(batch["completion_ids"], ends, strict=True)]


def by_group(rows: list[Any], size: int) -> list[list[Any]]:
    assert len(rows) % size == 0
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def varies(group: list[Earned]) -> bool:
    return len({earned for _, _, earned in group}) > 1


def advantages_of(earned: list[float]) -> Tensor:
    """Return TRL's advantages of groups of 4."""
    grouped = torch.tensor(earned).view(-1, 4)
    return ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


def assert_ledger(
    groups: list[list[Earned]], batches: list[list[Completion]], surplus: list[list[Completion]], size: int
) -> None:
    """Every group that varies trains once, in the order of its prompt, or is left over; no other group trains."""
    assert all(len({prompt for prompt, _, _ in group}) == 1 for group in groups)
    trained = [group for batch in batches for group in by_group(batch, size)]
    assert len(trained) > 4
    assert trained + surplus == [[completion for _, completion, _ in group] for group in groups if varies(group)]


def surplus_of(trainer: Any) -> list[list[Completion]]:
    return [[tuple(row["completion_ids"].tolist()) for row in group.rows] for group in trainer._sampler.surplus]


def test_every_group_that_trains_varies(tmp_path: Path, model: Path) -> None:
    """A reward function of weight 0 makes no group vary."""

    def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    ledger = Ledger()
    options = SAMPLING | {"aggregate": "prompt-mean-token-mean", "reward_funcs": [ledger, length]}
    done = run(model, tmp_path, ledger, trainer_options=options, reward_weights=[2.0, 0.0])
    batches, sampler = done.trainer.batches, done.trainer._sampler
    assert len(ledger.rounds) > len(batches) == 5
    assert_ledger(ledger.groups(), [completions_of(batch) for batch in batches], surplus_of(done.trainer), 4)
    assert 4 < min(map(len, ledger.rounds)) < max(map(len, ledger.rounds)) == 16  # as many as are missing
    asked = [group[0][0] for group in ledger.groups()]
    assert asked == [prompts()[i]["prompt"] for i in PromptOrder(25, 3, True).take(len(asked))]  # none is passed over
    for batch in batches:
        ends = batch["completion_mask"].sum(1)
        assert batch["num_items_in_batch"] == ends.sum()
        assert torch.equal(batch["group_tokens"], ends.view(-1, 4).sum(1).repeat_interleave(4))
        expected = advantages_of([2.0 * (ids[0] % 2 == 0) for ids in completions_of(batch)])
        torch.testing.assert_close(batch["advantages"], expected)
        assert batch["advantages"].view(-1, 4).abs().amax(1).min() > 0.1
        assert batch["completion_ids"].shape[1] == ends.max()
        assert (batch["prompt_mask"][:, -1] == 1).all()
        assert batch["prompt_mask"].any(0).all()
    logged = [entry for entry in done.log if "dynamic_sampling/rounds" in entry]
    names = ("rounds", "groups_used", "groups_generated")
    total = [sum(entry[f"dynamic_sampling/{name}"] for entry in logged) for name in names]
    assert total == [len(ledger.rounds), 20, sampler.order.drawn]
    assert sampler.order.drawn == len(ledger.groups())
    assert logged[-1]["dynamic_sampling/groups_carried_over"] == len(sampler.surplus)
    accepted = sum(e["dynamic_sampling/accepted_share"] * e["dynamic_sampling/groups_generated"] for e in logged)
    assert accepted == pytest.approx(20 + len(sampler.surplus))


def logprobs(network: Any, batch: dict[str, Any], i: int) -> Tensor:
    ids = torch.cat([batch["prompt_ids"][i], batch["completion_ids"][i]])[None]
    mask = torch.cat([batch["prompt_mask"][i], batch["completion_mask"][i]])[None]
    width = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logits = network(input_ids=ids, attention_mask=mask).logits[0, -width - 1 : -1]
    found = logits.log_softmax(-1).gather(-1, batch["completion_ids"][i][:, None])[:, 0]
    return found[: int(batch["completion_mask"][i].sum())]


def test_surplus_groups_keep_the_policy_that_sampled_them(tmp_path: Path, model: Path) -> None:
    """Old log-probs are those of that policy; a batch without such groups has none, as in TRL."""
    ledger = Ledger()
    done = run(model, tmp_path, ledger, max_steps=8, beta=0.1)
    network, carried = load(model), 0
    for step, batch in enumerate(done.trainer.batches):
        asked = zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        texts = [tuple(ids[mask.bool()].tolist()) for ids, mask in asked]
        steps = [ledger.steps[key] for key in zip(texts, completions_of(batch), strict=True)]
        carried += min(steps) < step
        assert ("old_per_token_logps" in batch) == (min(steps) < step)
        for i in range(len(steps)) if min(steps) < step else []:
            network.load_state_dict(ledger.weights[steps[i]], strict=False)
            expected = logprobs(network, batch, i)
            torch.testing.assert_close(batch["old_per_token_logps"][i, : len(expected)], expected, rtol=1e-4, atol=1e-4)
        network.load_state_dict(done.start, strict=False)
        for i in range(len(steps)):
            expected = logprobs(network, batch, i)
            torch.testing.assert_close(batch["ref_per_token_logps"][i, : len(expected)], expected, rtol=1e-4, atol=1e-4)
    assert 0 < carried < len(done.trainer.batches)
    moved = [float((ledger.weights[7][name] - x).abs().max()) for name, x in ledger.weights[0].items()]
    assert max(moved) > 1e-3


class BetaOfEachStep(TrainerCallback):
    """A schedule of the KL penalty: off after the first update, on after the second, and so on."""

    trainer: Any

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.beta = 0.1 * (state.global_step % 2 == 0)


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=4, task_type="CAUSAL_LM")], ids=["", "lora"])
def test_beta_may_change_while_groups_are_carried_over(tmp_path: Path, model: Path, adapter: Any) -> None:
    """A group has log-probs of the reference exactly when it trains with a penalty."""

    def add_schedule(trainer: Any) -> None:
        schedule = BetaOfEachStep()
        schedule.trainer = trainer
        trainer.add_callback(schedule)

    ledger, given = Ledger(), SAMPLING | {"peft_config": adapter}
    done = run(model, tmp_path, ledger, max_steps=12, beta=0.1, prepare=add_schedule, trainer_options=given)
    carried, reference = set(), load(model)
    for step, batch in enumerate(done.trainer.batches):
        assert ("ref_per_token_logps" in batch) == (step % 2 == 0)
        if "old_per_token_logps" in batch:
            carried.add(step % 2)
        for i in range(16) if step % 2 == 0 else []:
            expected = logprobs(reference, batch, i)
            torch.testing.assert_close(batch["ref_per_token_logps"][i, : len(expected)], expected, rtol=1e-4, atol=1e-4)
    assert carried == {0, 1}


SIX_UPDATES = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6}


def outcome(model: Path, folder: Path, step: int = 0, **options: Any) -> dict[str, Any]:
    """Return what six updates did; with ``step`` those after its checkpoint."""
    ledger = Ledger()
    resume = str(folder / f"checkpoint-{step}") if step else None
    done = run(model, folder, ledger, **SIX_UPDATES | options, resume=resume)
    found = {"rounds": ledger.rounds, "batches": [completions_of(batch) for batch in done.trainer.batches]}
    found |= {"counted": [int(batch["num_items_in_batch"]) for batch in done.trainer.batches]}
    sampler = done.trainer._sampler
    state = {"surplus": surplus_of(done.trainer), "share": sampler.share, "drawn": sampler.order.drawn}
    return found | state | {"weights": done.weights}


def carried_over(folder: Path) -> int:
    """Return the first step of a run whose checkpoint carries groups over."""
    states = {step: folder / f"checkpoint-{step}" / STATE_FILE for step in range(1, 6)}
    return next(step for step, path in states.items() if torch.load(path, weights_only=True)["surplus"])


def assert_resumed(rest: dict[str, Any], whole: dict[str, Any], step: int) -> None:
    assert rest["batches"] == whole["batches"][step:]
    assert rest["rounds"] == whole["rounds"][-len(rest["rounds"]) :]
    assert all(rest[name] == whole[name] for name in ("surplus", "share", "drawn"))
    torch.testing.assert_close(rest["weights"], whole["weights"], rtol=1e-6, atol=1e-6)


def on_a_rank(rank: int, folder: Path, steps: dict[int, int]) -> None:
    """Runs with groups of each size, from a step on."""
    for size, step in steps.items():
        options = {"num_generations": size, "per_device_train_batch_size": 3}
        torch.save(outcome(folder / "model", folder / f"{size}", step, **options), folder / f"{rank} {size} {step}.pt")


@pytest.mark.ranks
def test_two_ranks(tmp_path: Path) -> None:
    """Groups lie across ranks; rounds of 3 only come in pairs. Two new processes resume with surplus groups."""
    save_tiny_model(tmp_path / "model")
    steps, wholes = {4: 0, 3: 0}, {}
    on_ranks(2, on_a_rank, tmp_path, steps)
    for size in steps:
        whole, other = (torch.load(tmp_path / f"{rank} {size} 0.pt") for rank in range(2))
        rounds = [a + b for a, b in zip(whole["rounds"], other["rounds"], strict=True)]
        batches = [a + b for a, b in zip(whole["batches"], other["batches"], strict=True)]
        groups = [group for rows in rounds for group in by_group(rows, size)]
        assert_ledger(groups, batches, whole["surplus"], size)
        assert len(rounds) > len(batches) == 6
        assert (whole["surplus"], whole["share"]) == (other["surplus"], other["share"])
        assert whole["counted"] == other["counted"] == [sum(map(len, batch)) for batch in batches]
        assert all(torch.equal(whole["weights"][name], weight) for name, weight in other["weights"].items())
        wholes[size], steps[size] = whole, carried_over(tmp_path / f"{size}")
    on_ranks(2, on_a_rank, tmp_path, steps)
    for size, step in steps.items():
        assert_resumed(torch.load(tmp_path / f"0 {size} {step}.pt"), wholes[size], step)


def test_resume(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt order, surplus and rate of acceptance are in the checkpoint: the run goes on as if it had not stopped."""
    whole, step = outcome(model, tmp_path), carried_over(tmp_path)
    surplus = torch.load(tmp_path / f"checkpoint-{step}" / STATE_FILE, weights_only=True)["surplus"]
    assert all(bool(row["prompt_mask"].all()) for group in surplus for row in group["rows"])  # without padding
    assert_resumed(outcome(model, tmp_path, step), whole, step)
    other = SAMPLING | {"train_dataset": prompts(("mixed",), n=30)}
    with pytest.raises(ValueError, match="train_dataset"):
        run(model, tmp_path, Ledger(), **SIX_UPDATES, resume=True, trainer_options=other)
    with pytest.raises(ValueError, match=r"num_generations=8.*num_generations=4"):
        outcome(model, tmp_path, step, num_generations=8)
    engine = Ledger()
    monkeypatch.setattr(
        engine, "generate", lambda *given: Ledger.generate(engine, *given) | {"logprobs": [[-3.0] * WIDTH] * 16}
    )
    with pytest.raises(ValueError, match=r"sampling_per_token_logps.*use_vllm"):
        run(model, tmp_path, engine, **SIX_UPDATES, resume=str(tmp_path / f"checkpoint-{step}"))
    for path in tmp_path.glob(f"*/{STATE_FILE}"):
        path.unlink()
    fresh = run(model, tmp_path, Ledger(), **SIX_UPDATES | {"max_steps": 7}, resume=True)
    assert fresh.trainer._sampler.order.drawn < whole["drawn"]  # from the first prompt


@pytest.mark.parametrize("options", [{}, OFF_POLICY])
def test_the_same_bits_where_every_group_varies(tmp_path: Path, model: Path, options: dict[str, Any]) -> None:
    """As TRL's order of prompts, batches and weights without the option."""
    found = [
        run(model, tmp_path, Ledger(), kinds=("unique",), trainer_options=how, **({"max_steps": 3} | options))
        for how in (SAMPLING, {})
    ]
    assert found[0].trainer._sampler.order.drawn > 0
    assert found[1].trainer._sampler is None
    moved = 0.0
    for name, weight in found[0].weights.items():
        assert torch.equal(weight, found[1].weights[name])
        moved = max(moved, float((weight - found[0].start[name]).abs().max()))
    assert moved > 1e-3


def part(even: float, odd: float) -> Callable[..., list[float]]:
    """Return a reward by the first token, a part of a sum."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [odd if ids[0] % 2 else even for ids in completion_ids]

    return reward


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        (("easy", "hard"), {"max_sampling_rounds": 3}),
        (("easy",), {"max_sampling_rounds": 2, "on_sampling_exhausted": "train_partial"}),  # needs one that varies
        (("gaps",), {"max_sampling_rounds": 2}),  # a completion without a score is no variation
        (("easy",), {"max_sampling_rounds": 2, "overlong_cache_length": 8}),  # nor is the length
        (("easy",), {"max_sampling_rounds": 2, "reward_funcs": (part(0.6, 0.3), part(0.3, 0.6))}),  # nor is rounding
    ],
)
def test_the_rounds_are_bounded(tmp_path: Path, model: Path, kinds: tuple[str, ...], options: dict[str, Any]) -> None:
    ledger = Ledger()
    given = SAMPLING | options | {"reward_funcs": [ledger, *options.get("reward_funcs", ())]}
    with pytest.raises(RuntimeError, match="max_sampling_rounds") as caught:
        run(model, tmp_path, ledger, kinds=kinds, trainer_options=given)
    assert re.search(rf"={options['max_sampling_rounds']}\D+0\D+4\b", str(caught.value))
    assert len(ledger.rounds) == options["max_sampling_rounds"]


def test_a_partial_batch(tmp_path: Path, model: Path) -> None:
    """The rest of the batch has no token that trains, and counts in no token mean."""
    ledger = Ledger()
    partial = {**SAMPLING, "max_sampling_rounds": 1, "on_sampling_exhausted": "train_partial"}
    done = run(model, tmp_path, ledger, trainer_options=partial, kinds=("easy", "mixed"))
    n_accepted = []
    for batch, rows in zip(done.trainer.batches, ledger.rounds, strict=True):
        accepted = [group for group in by_group(rows, 4) if varies(group)]
        live = [completion for completion in completions_of(batch) if completion]
        assert live == [completion for group in accepted for _, completion, _ in group]
        assert len(batch["completion_mask"]) == 16
        assert batch["num_items_in_batch"] == sum(map(len, live))
        n_accepted.append(len(accepted))
    assert min(n_accepted) < 4
    assert sum(entry.get("dynamic_sampling/groups_used", 0) for entry in done.log) == sum(n_accepted)
    assert any(bool((weight != done.start[name]).any()) for name, weight in done.weights.items())
    assert all(bool(weight.isfinite().all()) for weight in done.weights.values())


def eq_13(length: int, longest: int, cache: int) -> float:
    return min(0.0, (longest - cache - length) / cache) if length <= longest else -1.0


@pytest.mark.parametrize(("longest", "cache"), [(None, 6), (9, 4)])
def test_soft_overlong_punishment(tmp_path: Path, model: Path, longest: int | None, cache: int) -> None:
    """A reward of its own, by length; a completion that nobody scored stays without one."""
    ledger, functions = Ledger(), list[Callable[..., Any]]()
    functions.append(ledger)
    options = {"overlong_cache_length": cache, "overlong_max_length": longest, "reward_funcs": functions}
    done = run(model, tmp_path, ledger, trainer_options=options, kinds=("mixed", "none"), max_steps=2)
    assert functions == [ledger]
    assert "rewards/soft_overlong_punishment_reward/mean" in done.log[0]
    punishments = set()
    for rows, rewards in zip(ledger.rounds, done.trainer.rewards, strict=True):
        for (_, completion, earned), (own, punishment) in zip(rows, rewards.tolist(), strict=True):
            assert (own != own) == (earned is None)
            expected = eq_13(len(completion), longest or WIDTH, cache)
            assert punishment != punishment if earned is None else punishment == pytest.approx(expected)
            punishments.add(expected)
    first = done.trainer.rewards[0]
    assert done.log[0]["reward"] == pytest.approx(float(first.sum(1).nanmean()))
    assert len(punishments) > 3
    assert min(punishments) == -1


@pytest.mark.parametrize("punishment", [{}, {"overlong_cache_length": 6}])
def test_overlong_filtering(tmp_path: Path, model: Path, punishment: dict[str, int]) -> None:
    """A truncated completion has no token that trains, and counts in its group. A group without any is replaced."""
    ledger = Ledger(cut="1+7=")
    options = SAMPLING | {"overlong_filtering": True} | punishment
    done = run(model, tmp_path, ledger, trainer_options=options, kinds=("mixed",), max_steps=3)
    eos, truncated = done.trainer.processing_class.eos_token_id, 0
    for batch in done.trainer.batches:
        rows = [tuple(ids[: ids.index(eos) + 1] if eos in ids else ids) for ids in batch["completion_ids"].tolist()]
        lives = [ids[-1] == eos for ids in rows]
        assert batch["completion_mask"].sum(1).tolist() == [len(ids) if ids[-1] == eos else 0 for ids in rows]
        assert all(any(group) for group in by_group(lives, 4))
        truncated += lives.count(False)
        earned = [float(ids[0] % 2 == 0) + (eq_13(len(ids), WIDTH, 6) if punishment else 0) for ids in rows]
        torch.testing.assert_close(batch["advantages"], advantages_of(earned))
    assert truncated
    assert any(group[0][0].endswith("1+7=") and varies(group) for group in ledger.groups())


def test_evaluation_is_not_resampled(tmp_path: Path, model: Path) -> None:
    evaluated = Dataset.from_dict({"prompt": ["1+2=", "33+4="], "kind": ["easy", "hard"]})
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "max_steps": 1}
    ledger = Ledger()
    done = run(model, tmp_path, ledger, **options, trainer_options=SAMPLING | {"eval_dataset": evaluated})
    assert {prompt for prompt, _, _ in ledger.rounds[-1]} <= {"1+2=", "33+4="}
    assert any("eval_loss" in entry for entry in done.log)
    assert not any(name.startswith("eval_dynamic_sampling") for entry in done.log for name in entry)


def test_images_are_refused(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = GRPOTrainer._generate_and_score_completions
    more = {"pixel_values": torch.zeros(16, 3), "num_images": [1] * 16}
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", lambda self, x: plain(self, x) | more)
    with pytest.raises(ValueError, match=r"dynamic_sampling.*num_images, pixel_values"):
        run(model, tmp_path, Ledger(), kinds=("unique",))


def test_the_order_of_prompts() -> None:
    """That of TRL's sampler, epoch after epoch, and without its loss of the last incomplete batch."""
    sampler = trl.trainer.utils.RepeatSampler(range(6), mini_repeat_count=1, batch_size=3, seed=7)
    expected = [*sampler, *sampler, *sampler]
    order = PromptOrder(6, 7, True)
    assert order.take(5) + order.take(13) == expected
    later = PromptOrder(6, 7, True)
    later.drawn = 14
    assert later.take(4) == expected[14:]
    assert PromptOrder(3, 7, False).take(7) == [0, 1, 2, 0, 1, 2, 0]
    assert sorted(PromptOrder(5, 7, True).take(5)) == list(range(5))


def test_the_snippet_of_the_page(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/trl.md, as it stands there, with the settings of a tiny model beside its own."""
    page = (Path(__file__).parents[2] / "docs" / "trl.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"<!-- dapo -->\n```python\n(.+?)```", page, re.DOTALL)
    tiny = {"use_cpu": True, "bf16": False, "max_steps": 2, "report_to": "none", "save_strategy": "no"}
    tiny |= {"logging_steps": 1, "num_generations": 4, "max_completion_length": 8}
    tiny |= {"per_device_train_batch_size": 8, "steps_per_generation": 2}
    monkeypatch.setattr(trl, "GRPOConfig", lambda *_, **settings: GRPOConfig(str(tmp_path), **(settings | tiny)))
    source, n_replaced = re.subn(r'("overlong_cache_length": )\d+', r"\g<1>4", snippet)
    assert n_replaced == 1
    names: dict[str, Any] = {"model": str(model), "dataset": prompts()}
    names["correct"] = lambda completion_ids, **_: [float(ids[0] % 2 == 0) for ids in completion_ids]
    exec(source, names)
    log = names["trainer"].state.log_history
    assert any(entry.get("dynamic_sampling/groups_used") == 4 for entry in log)
    assert any("rewards/soft_overlong_punishment_reward/mean" in entry for entry in log)
