"""On-policy distillation: the loss against longhand and TRL's GKD, what is refused, and a run that learns."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders import backward, make_config, pack_mini_batch, random_sequences, save_model, write_rows
from refusals import refused
from small import small_recipe
from test_train import Notes

from dapo_runner.algorithms.learner import Learner
from dapo_runner.commands.recipes import find_recipe
from dapo_runner.config import (
    Config,
    ConfigError,
    ModelConfig,
    TinyModelConfig,
    apply_overrides,
    load_config,
    parse_config,
)
from dapo_runner.logging.metrics import read_log
from dapo_runner.policy.model import Policy, load_policy
from dapo_runner.run.tiny_model import ensure_tiny_model, make_model, make_tokenizer
from dapo_runner.train import train

CPU = torch.device("cpu")
PAGE = (Path(__file__).parents[3] / "docs" / "distillation.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"<!-- (.+?) -->\n```\w*\n(.+?)```", PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model than the policy: of its own width, and with rows that pad its head."""
    torch.manual_seed(8)
    sizes = TinyModelConfig(layers=2, hidden_size=48, heads=2, intermediate_size=64)
    model = make_model(sizes, tokenizer := make_tokenizer(), max_positions=256)
    model.resize_token_embeddings(len(tokenizer) + 5, mean_resizing=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return save_model(model, tokenizer, tmp_path_factory.mktemp("teacher"))


def open_learner(policy: Policy, path: Path, **sections: Any) -> Learner:
    config = make_config(**{"distillation": {"teacher": str(path)}, **sections})
    return Learner(policy, config, load_policy(path, ModelConfig(path="x", dtype="float32"), CPU, role="reference"))


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_value_and_gradient_are_those_of_trl(policy: Policy, teacher: Path, beta: float) -> None:
    """On one mini-batch in several micro-batches, at the rollout's temperature; of reverse KL also spelled out."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    gkd = pytest.importorskip("trl.experimental.gkd", reason="TRL is not installed")
    settings = {"teacher": str(teacher), "beta": beta}
    learner = open_learner(policy, teacher, distillation=settings, rollout={"temperature": 0.7})
    sequences = random_sequences(10)
    mini = pack_mini_batch(learner, sequences, budget=40)
    assert len(mini.micro_batches) > 2
    outs = [backward(learner, mini, batch) for batch in mini.micro_batches]
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    policy.model.zero_grad()

    def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
        model.set_attn_implementation("eager")
        return model(input_ids=ids[None], use_cache=False).logits[0, :-1, : len(policy.head.weight)].double()

    assert learner.reference is not None
    rows, n_tokens, entropy, reverse = [], sum(int(x.mask[1:].sum()) for x in sequences), 0.0, 0.0
    for sequence in sequences:
        mine, mask = logits(policy.model, sequence.token_ids)[sequence.mask[1:]], sequence.mask[1:]
        with torch.no_grad():
            of_teacher = logits(learner.reference.model, sequence.token_ids)[mask]
        labels = sequence.token_ids[1:][mask]
        rows.append((mine, of_teacher, labels))
        log_p, log_q = (mine / 0.7).log_softmax(-1).detach(), (of_teacher / 0.7).log_softmax(-1)
        reverse += float((log_p.exp() * (log_p - log_q)).sum()) / n_tokens
        entropy -= float((log_p.exp() * log_p).sum())
    mine, of_teacher, labels = map(torch.cat, zip(*rows, strict=True))
    divergence = gkd.GKDTrainer.generalized_jsd_loss
    loss = divergence(mine, of_teacher, labels, beta=beta, temperature=0.7, num_items_in_batch=n_tokens)
    loss.backward()
    value = sum(float(out.loss.detach()) for out in outs)
    assert value == pytest.approx(float(loss.detach()), rel=1e-5)
    assert value == pytest.approx(reverse, rel=1e-5) or beta != 1
    assert sum(float(out.metrics["entropy"]) for out in outs) == pytest.approx(entropy, rel=1e-4)
    assert sum(int(out.metrics["tokens"]) for out in outs) == n_tokens
    for name, parameter in policy.model.named_parameters():
        assert (found[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name
    assert all(parameter.grad is None for parameter in learner.reference.model.parameters())


def test_a_teacher_with_another_tokenizer_is_refused(policy: Policy, teacher: Path) -> None:
    other = load_policy(teacher, ModelConfig(path="x", dtype="float32"), CPU, role="reference")
    other.tokenizer.add_tokens(["@"])
    with refused("distillation.teacher"):
        Learner(policy, make_config(distillation={"teacher": str(teacher)}), other)
    with refused("loss.reference"):
        Learner(policy, make_config(loss={"objective": "grpo"}), other)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm=on_policy_distillation"], r"distillation\.teacher"),
        (["distillation.teacher=x", "preference.beta=0.1"], "distillation"),
        (["distillation.teacher=x", "loss.objective=gspo"], "distillation"),
        (["distillation.teacher=x", "distillation.beta=1.5"], r"distillation\.beta"),
    ],
)
def test_settings_that_do_not_fit(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?m)^{key}:"):
        parse_config(apply_overrides(small_recipe(), overrides))


def distil(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    recipe = small_recipe(output_dir=str(folder), name=name, steps=20, save_every=20, eval_every=10)
    own = ["algorithm=on_policy_distillation", "rollout.group_size=1", "sampler.prompts_per_step=24"]
    own += ["optimizer.mini_batch_size=null", "optimizer.token_budget=256", "optimizer.lr=1e-3"]
    return read_log(train(parse_config(apply_overrides(recipe, [*own, *overrides])), Notes()) / "metrics.jsonl")


def test_a_student_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    """One response to each prompt; the teacher is wider and has seen more worked examples."""
    warmup = ["model.tiny.hidden_size=64", "model.tiny.warmup.steps=300", "run.seed=1"]
    recipe: Config = parse_config(apply_overrides(small_recipe(), warmup))
    path = ensure_tiny_model(recipe, tmp_path / "teacher", str)
    events = distil(tmp_path, "student", f"distillation.teacher={path}")
    steps = [event for event in events if event["kind"] == "step"]
    losses = [event["train/loss"] for event in steps]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert all(event["train/updates"] == 1 and event["train/entropy"] > 0 for event in steps)
    assert [event["eval/avg@2"] >= 0 for event in events if event["kind"] == "eval"] == [True] * 3


def test_the_page(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands name a checkpoint that the first of them leaves. Its recipe runs, also without answers."""
    first, second = (
        load_config(find_recipe(line.split()[2]), line.split()[3:])
        for line in SNIPPETS["commands"].strip().splitlines()
    )
    assert second.reference_path == str(first.run_dir / "checkpoints" / f"step_{first.run.steps:06d}" / "model")
    monkeypatch.chdir(tmp_path)
    for name in ("teacher", "student"):
        shutil.copytree(model_folder, Path("models", name))
    write_rows(Path("questions.jsonl"), [{"question": f"{i}+1=", "solution": str(i + 1)} for i in range(24)])
    small = [
        "model.dtype=float32",
        "run.steps=1",
        "run.name=answered",
        "run.output_dir=runs",
        "data.eval_size=4",
        "evaluation.k=2",
    ]
    small += ["rollout={group_size: 1, max_prompt_tokens: 8, max_response_tokens: 8}", "sampler.prompts_per_step=8"]
    recipe = apply_overrides(yaml.safe_load(SNIPPETS["recipe"]), small)
    without = ["data.columns.answer=null", "run.name=unanswered"]
    without += [
        "data.eval={exam: {path: questions.jsonl, split: train, columns: {prompt: question, answer: solution}}}"
    ]
    write_rows(Path("unanswered.jsonl"), [{"question": f"{i}+2="} for i in range(24)])
    for overrides in ([], [*without, "data.path=unanswered.jsonl"]):
        events = read_log(train(parse_config(apply_overrides(recipe, overrides)), Notes()) / "metrics.jsonl")
        assert [event["train/loss"] for event in events if event["kind"] == "step"] == [pytest.approx(0, abs=1e-6)]
        assert all("eval/avg@2" in event for event in events if event["kind"] == "eval")
