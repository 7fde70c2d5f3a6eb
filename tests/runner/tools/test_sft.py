"""`dapo sft`: what it imitates, that it is cross-entropy, and that a run which was killed is the same run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import make_completion, make_config, make_prompt, write_rows
from fake_api import FakeAPI, says
from refusals import refused
from safetensors.torch import load_file
from sft_runs import recipe_of, run, steps_of, write_sft_recipe
from test_train import Notes

from dapo_runner.checkpoint import checkpoint_to_resume
from dapo_runner.cli import main
from dapo_runner.config import ConfigError, SftConfig, parse
from dapo_runner.data.dataset import IN_HELDOUT
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.run.folder import check_same_run, write_config
from dapo_runner.run.tiny_model import make_tokenizer
from dapo_runner.tools.sft.data import load_examples
from dapo_runner.tools.sft.run import sft

SUMS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)]


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "sums.jsonl", SUMS)


def test_its_loss_is_the_cross_entropy_of_the_completions(model_folder: Path, sums: Path) -> None:
    from transformers import AutoModelForCausalLM

    optimizer = {
        "mini_batch_size": 90,
        "warmup_steps": 1,
        "weight_decay": 0.0,
        "grad_clip": None,
        "schedule": "constant",
    }
    folder = run(model_folder, sums, run={"epochs": 1}, optimizer=optimizer)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    examples = load_examples(parse(recipe_of(model_folder, sums), SftConfig), make_tokenizer())

    def cross_entropy(name: str) -> torch.Tensor:
        sequence = examples.sequences[name]
        logits = model(sequence.token_ids[None, :-1]).logits[0]
        return F.cross_entropy(logits[sequence.mask[1:]], sequence.token_ids[1:][sequence.mask[1:]], reduction="sum")

    tokens = sum(len(prompt.answer) + 1 for prompt in examples.heldout)
    loss = sum(cross_entropy(prompt.id).item() for prompt in examples.heldout) / tokens
    assert steps_of(folder, "eval/loss")[0] == pytest.approx(loss, rel=1e-5)
    tokens = sum(len(prompt.answer) + 1 for prompt in examples.train)
    total = torch.stack([cross_entropy(prompt.id) for prompt in examples.train]).sum() / tokens
    assert steps_of(folder, "train/loss") == [pytest.approx(total.item(), rel=1e-5)]
    total.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert steps_of(folder, "train/grad_norm") == [pytest.approx(norm.item(), rel=1e-4)]


CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
VERDICT = {"problem": "1+2", "reference": "3", "response": "<eos>3</x>", "verdict": "1", "confidence": 0.9}


@pytest.mark.parametrize(
    ("row", "data", "prompt"),
    [
        ({"prompt": "1+2=", "completion": "3"}, {}, "1+2="),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {}, "1+2="),
        ({"messages": CHAT}, {}, "1+2="),
        ({"messages": CHAT}, {"system": "7"}, "7\n\n1+2="),
        ({"talk": CHAT}, {"columns": {"messages": "talk"}}, "1+2="),
        ({"q": "1+2=", "a": "3"}, {"columns": {"prompt": "q", "completion": "a"}}, "1+2="),
        (VERDICT, {"judge": {"template": "<x>{response}</x>{reference}"}}, "<x>< eos>3< /x></x>3"),
    ],
)
def test_what_a_row_is(model_folder: Path, tmp_path: Path, row: Any, data: Any, prompt: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [row, {**row, "verdict": None} if row is VERDICT else row])
    recipe = parse(recipe_of(model_folder, path, data={"eval_size": 0, **data}), SftConfig)
    tokenizer = make_tokenizer()
    examples = load_examples(recipe, tokenizer)
    (example, *_) = examples.train
    assert example.text == prompt
    sequence = examples.sequences[example.id]
    said = ["1" if row is VERDICT else "3", "<eos>"]
    assert tokenizer.convert_ids_to_tokens(sequence.token_ids[sequence.mask].tolist()) == said
    dropped = "1 training and 0 held-out examples; dropped 1 without a verdict" if row is VERDICT else "2 training"
    assert dropped in examples.report.describe("examples")


def test_what_is_held_out_does_not_train(model_folder: Path, tmp_path: Path) -> None:
    rows = [*SUMS[:20], SUMS[3], {"prompt": "1" * 40, "completion": "2"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    held = write_rows(tmp_path / "held.jsonl", SUMS[2:9])
    recipe = parse(recipe_of(model_folder, path, data={"eval_path": str(held), "eval_size": 5}), SftConfig)
    examples = load_examples(recipe, make_tokenizer())
    assert [prompt.text for prompt in examples.heldout] == [row["prompt"] for row in SUMS[2:7]]
    assert not {prompt.id for prompt in examples.heldout} & {prompt.id for prompt in examples.train}
    counts = {
        "longer than data.max_tokens": 1,
        "held-out rows past data.eval_size": 2,
        "rows": 29,
        "train": 15,
        "heldout": 5,
        IN_HELDOUT: 6,
    }
    assert {what: count for what, count in examples.report.items() if count} == counts


@pytest.mark.parametrize(
    ("sections", "key", "part"),
    [
        ({"data": {"columns": {"prompt": "q"}}}, "data.columns", "'q'"),
        ({"data": {"eval_size": 100}}, "data.eval_size", "100"),
        ({"optimizer": {"schedule": "constant", "min_lr_ratio": 0.1}}, "optimizer.min_lr_ratio", "optimizer.schedule"),
        ({"data": {"max_tokens": 2}}, "data.path", "data.max_tokens"),
        ({"data": {"eval_size": 0, "chat_template": "always"}}, "data.chat_template", "'always'"),
        ({"data": {"path": "no.jsonl"}}, "data.path", "no.jsonl"),
        ({"model": {"path": None, "tiny": {}}}, "model.path", "null"),
        ({"optimizer": {"warmup_steps": 12}}, "optimizer.warmup_steps", "12"),
        ({"optimizer": {"token_budget": 30}}, "optimizer.token_budget", "31"),
        ({"rollout": {"top_p": 1.0}}, "rollout", "model"),
        ({"data": {"colums": {}}}, "data.colums", "'columns'"),
    ],
)
def test_a_mistake_is_one_line_that_names_its_setting(
    model_folder: Path, sums: Path, sections: Any, key: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sft_recipe(model_folder, sums, sums.parent / "sft.yaml", **sections)
    for command in (["sft", str(path), "--dry-run"], ["sft", str(path)]):
        assert main(command) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
        assert line.startswith("dapo: ")
        assert re.search(rf"(?<![\w.]){re.escape(key)}(?!\.?\w)", line)
        assert part in line


def test_the_recipe_of_the_page(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "sft.md").read_text(encoding="utf-8")
    recipe = tmp_path / "page.yaml"
    recipe.write_text(page.partition("<!-- recipe -->\n```yaml\n")[2].partition("```")[0])
    rows = [{**VERDICT, "reference": str(number)} for number in range(1500)]
    roomy = shutil.copytree(model_folder, tmp_path / "roomy")
    config = json.loads((roomy / "config.json").read_text())
    (roomy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    here = [f"data.path={write_rows(tmp_path / 'verdicts.jsonl', rows)}", f"model.path={roomy}"]
    assert main(["sft", str(recipe), "--dry-run", *here]) == 0
    assert re.search(r"\b1500\D+1436\D+64\b", capsys.readouterr().out)


def test_a_dry_run_of_several_ranks(model_folder: Path, sums: Path, tmp_path: Path) -> None:
    recipe = write_sft_recipe(model_folder, sums, tmp_path / "sft.yaml")
    launch = ["launch", str(recipe), "--sft", "--dry-run", "parallel.sequence=2", "--gpus"]
    assert main([*launch, "2"]) == 0
    assert main([*launch, "3"]) == 2


class Lost(Notes):
    """Ends a run in an update."""

    def __init__(self, update: int) -> None:
        super().__init__()
        self.updates = update

    def phase(self, name: str) -> None:
        self.updates -= name == "forward_backward"
        if self.updates == 0:
            raise KeyboardInterrupt


def test_an_interrupted_run_equals_an_uninterrupted_one(model_folder: Path, sums: Path) -> None:
    whole = run(model_folder, sums, run={"name": "whole"})
    recipe = parse(recipe_of(model_folder, sums, run={"name": "lost"}), SftConfig)
    with pytest.raises(KeyboardInterrupt):
        sft(recipe, Lost(9))  # some way behind a checkpoint
    again = sft(recipe, Notes())
    assert (again / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    one, two = (checkpoint_to_resume(folder / "checkpoints") for folder in (whole, again))
    assert one.step == two.step == 12
    for name in ("optimizer/shard-00001-model-00001-of-00001.safetensors", "model/model.safetensors"):
        ours, theirs = (load_file(found.path / name) for found in (one, two))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert steps_of(whole, "eval/loss")[-1] < 0.7 * steps_of(whole, "eval/loss")[0]


def test_a_folder_of_another_run_or_command_is_refused(
    model_folder: Path, sums: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model_folder, sums, run={"epochs": 0.5})
    folder = run(model_folder, sums, run={"epochs": 0.6}, optimizer={"lr": 1e-3})
    assert len(steps_of(folder, "train/loss")) == 4
    with refused("data.max_tokens") as caught:
        run(model_folder, sums, run={"epochs": 1}, data={"max_tokens": 31})
    assert "32" in str(caught.value)
    trains = make_config(run={"output_dir": str(folder.parent), "name": folder.name})
    with pytest.raises(ConfigError, match="dapo sft"):
        check_same_run(trains, folder)
    assert main(["report", str(folder)]) == 0  # which is for both
    assert main(["eval", str(folder)]) == 2
    assert "dapo sft" in capsys.readouterr().err
    write_config(trains, folder)
    with pytest.raises(ConfigError, match="dapo train"):
        run(model_folder, sums, run={"epochs": 0.5})


def test_a_small_judge_is_distilled_from_a_large_one(model_folder: Path, tmp_path: Path) -> None:
    """The large one is an API that knows when two numbers are the same; the small one learns it from its verdicts."""
    prompt = {"template": "{reference}={response}?", "answers": ["1", "0"]}

    def large(body: dict[str, Any]) -> dict[str, Any]:
        reference, _, response = body["messages"][-1]["content"].rstrip("?").partition("=")
        sure = 0.9 if reference == response else 0.1
        return says("1", **{"1": sure, "0": 1 - sure})

    prompts = [make_prompt(str(number), answer=str(number)) for number in range(4)]
    answers = [[make_completion(text=str(number)) for number in range(4)] for _ in prompts]
    with FakeAPI(large) as api:
        judge = {"url": api.url, "model": "large", **prompt}
        scorer = Scorer(make_config(reward={"kind": "judge", "judge": judge}))
        scorer.judge.known.open(tmp_path)
        scorer(prompts, answers)
    folder = run(
        model_folder,
        tmp_path / "verdicts.jsonl",
        run={"epochs": 80, "save_every": 0},
        data={"judge": prompt, "eval_size": 0},
        optimizer={"lr": 3e-3, "schedule": "constant"},
    )
    found = checkpoint_to_resume(folder / "checkpoints")
    small = {"model": str(found.model), **prompt}
    groups = Scorer(make_config(reward={"kind": "judge", "judge": small}))(prompts, answers)
    right = [s.correct == (s.completion.text == g.prompt.answer) for g in groups for s in g.samples]
    assert all(right)
