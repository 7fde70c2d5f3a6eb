"""`dapo sft`: what it imitates, that it is cross-entropy, and that a run which was killed is the same run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
import yaml
from builders import make_completion, make_config, make_prompt, snippets_of, write_rows
from fake_api import FakeAPI, says
from refusals import refused
from safetensors.torch import load_file
from sft_runs import recipe_of, run, steps_of, write_sft_recipe
from small import AtPhase, Dapo, Notes
from talkers import chat_tokenizer, sentencepiece_spaces
from transformers import AutoModelForCausalLM

from dapo_runner.checkpoint.files import checkpoint_to_resume
from dapo_runner.config import ConfigError, JudgeConfig, SftConfig, parse
from dapo_runner.data.dataset import IN_HELDOUT
from dapo_runner.logging.run_log import RunLog
from dapo_runner.rewards.judge import Question, Questioner
from dapo_runner.rewards.judge_model import JudgeModel, special_tokens
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.run.folder import check_same_run, write_config
from dapo_runner.tiny_model import make_tokenizer
from dapo_runner.tools.sft.data import load_examples
from dapo_runner.tools.sft.run import plan_updates, sft
from dapo_runner.types import Prompt

SUMS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)]


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "sums.jsonl", SUMS)


def test_its_loss_is_the_cross_entropy_of_the_completions(model_folder: Path, sums: Path) -> None:
    plain = {"warmup_steps": 1, "weight_decay": 0.0, "grad_clip": None, "schedule": "constant"}
    folder = run(model_folder, sums, run={"epochs": 1}, optimizer={"mini_batch_size": 90, **plain})
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    examples = load_examples(parse(recipe_of(model_folder, sums), SftConfig), make_tokenizer())

    def cross_entropy(prompts: list[Prompt]) -> torch.Tensor:
        """The mean over the tokens of all completions, each with its end."""
        found, n_tokens = [], 0
        for prompt in prompts:
            sequence = examples.sequences[prompt.id]
            logits = model(sequence.token_ids[None, :-1]).logits[0]
            trained = sequence.mask[1:]
            found.append(F.cross_entropy(logits[trained], sequence.token_ids[1:][trained], reduction="sum"))
            n_tokens += len(prompt.answer) + 1
        return torch.stack(found).sum() / n_tokens

    loss = cross_entropy(examples.heldout).item()
    assert steps_of(folder, "eval/loss")[0] == pytest.approx(loss, rel=1e-5)
    total = cross_entropy(examples.train)
    assert steps_of(folder, "train/loss") == [pytest.approx(total.item(), rel=1e-5)]
    total.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert steps_of(folder, "train/grad_norm") == [pytest.approx(norm.item(), rel=1e-4)]


TALK = {"columns": {"messages": "talk"}}
CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
VERDICT = {"problem": "1+2", "reference": "3", "response": "<eos>3</x>", "verdict": "1"}


@pytest.mark.parametrize(
    ("row", "data", "prompt"),
    [
        ({"prompt": "1+2=", "completion": "3"}, {}, "1+2="),
        ({"prompt": "1+2=", "completion": "3<eos>"}, {}, "1+2="),  # which ends only once
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {}, "1+2="),
        ({"messages": CHAT}, {"system": "7"}, "7\n\n1+2="),
        ({"messages": [{"role": "system", "content": ""}, *CHAT]}, {"system": "7"}, "7\n\n1+2="),
        ({"talk": [{"from": "human", "value": "1+2="}, {"from": "gpt", "value": "3"}]}, TALK, "1+2="),
        ({"talk": CHAT}, TALK, "1+2="),
        ({"q": "1+2=", "a": "3"}, {"columns": {"prompt": "q", "completion": "a"}}, "1+2="),
        (
            VERDICT,
            {"judge": {"template": "<x>{response}</x>{reference}", "answers": ["1", "0"]}},
            "<x>< eos>3< /x></x>3",
        ),
    ],
)
def test_what_a_row_is(model_folder: Path, tmp_path: Path, row: Any, data: Any, prompt: str) -> None:
    tokenizer = make_tokenizer()
    path = write_rows(tmp_path / "rows.jsonl", [row, {**row, "verdict": None}])
    examples = load_examples(parse(recipe_of(model_folder, path, data={"eval_size": 0, **data}), SftConfig), tokenizer)
    example = examples.train[0]
    assert example.text == prompt
    sequence = examples.sequences[example.id]
    said = [row.get("verdict", "3"), "<eos>"]
    assert tokenizer.convert_ids_to_tokens(sequence.token_ids[sequence.mask].tolist()) == said
    assert (len(examples.train), examples.report["without a verdict"]) == ((1, 1) if row is VERDICT else (2, 0))


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"messages": [CHAT[0], {**CHAT[1], "reasoning_content": "2"}]}, "reasoning_content"),
        ({"messages": [*CHAT[:1], {**CHAT[1], "thinking": "2"}, *CHAT]}, "thinking"),
        ({"prompt": "1+2=", "completion": [{**CHAT[1], "thinking": "2"}]}, "thinking"),
        ({"prompt": "1+2=", "completion": [CHAT[1], *CHAT]}, "data.columns.messages"),
        ({"prompt": "1+2=", "completion": " "}, "no completion"),
        ({"prompt": "1+2=", "completion": "4", "label": False}, "label (KTO)"),
        ({"messages": [CHAT[0], {**CHAT[1], "content": ""}]}, "no completion"),
        (VERDICT, "data.judge.answers"),  # whose default is YES and NO
    ],
)
def test_what_would_not_train_as_it_is_used_is_refused(model_folder: Path, tmp_path: Path, row: Any, part: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [row])
    with refused("data.columns", parts=["row 1", part]):
        load_examples(parse(recipe_of(model_folder, path, data={"eval_size": 0}), SftConfig), make_tokenizer())


@pytest.mark.parametrize("thinks", [None, True])
def test_a_verdict_trains_after_the_prompt_of_the_judge(
    thinks: bool | None, model_folder: Path, tmp_path: Path
) -> None:
    """Which does not think. ``data.chat_template_kwargs`` can change this."""
    prompt = {"template": "{reference}={response}", "answers": ["1", "0"]}
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking is false %}7{% endif %}="
    path = write_rows(tmp_path / "rows.jsonl", [VERDICT, {"prompt": "1+2", "completion": "3"}])
    data = {
        "judge": prompt,
        "eval_size": 0,
        "chat_template_kwargs": {} if thinks is None else {"enable_thinking": thinks},
    }
    verdict, other = load_examples(parse(recipe_of(model_folder, path, data=data), SftConfig), tokenizer).train
    assert other.text == "1+2="
    judge = JudgeModel(JudgeConfig(model=str(model_folder), **prompt), "cpu")
    judge.tokenizer.chat_template = tokenizer.chat_template
    question = Questioner(judge.config, special_tokens(tokenizer)).messages(Question("1+2", "3", VERDICT["response"]))
    assert (list(verdict.token_ids) == judge._tokens_of(question)) is (thinks is None)


ANSWERS = "{% for m in messages %}{% if m.role == 'assistant' %}=BEFORE{{ m.content }}END{% else %}{{ m.content }}"
OPENED = "{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.mark.parametrize(
    ("before", "end", "completion", "forms"),
    [
        ("", "<eos>\n", "3", None),
        ("", "", "3", None),
        ("", "<unk>", "3", ("=3<unk>'", "=3<eos>'")),
        ("7", "<eos>", "3", ("=73<eos>", "=3<eos>'")),
        ("{{ '' if '</think>' in m.content else '7' }}", "<eos>", "1</think>3", None),
        ("{{ '' if '</think>' in m.content else '7' }}", "<eos>", "3", ("=73<eos>", "=3<eos>'")),
    ],
)
def test_a_template_that_writes_answers_in_another_form_is_noted(
    model_folder: Path, tmp_path: Path, dapo: Dapo, before: str, end: str, completion: str, forms: Any
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ANSWERS.replace("BEFORE", before).replace("END", end) + OPENED
    # The first row may be in the form of the template, as a thought among plain answers.
    rows = [{"prompt": "1+2", "completion": text} for text in ("1</think>3", completion)]
    path = write_rows(tmp_path / "rows.jsonl", rows if "think" in before else rows[1:])
    note = load_examples(parse(recipe_of(model_folder, path, data={"eval_size": 0}), SftConfig), tokenizer).note
    assert (note is None) == (forms is None)
    assert all(form in (note or "") for form in forms or ())
    if forms:
        shutil.copytree(model_folder, model := tmp_path / "model")
        tokenizer.save_pretrained(model)
        settings = {"data": {"eval_size": 0}, "optimizer": {"mini_batch_size": 1, "warmup_steps": 1}}
        recipe = write_sft_recipe(model, path, tmp_path / "sft.yaml", **settings)
        assert "".join(str(note).split()) in "".join(dapo("sft", recipe, "--dry-run").split())
        notes = Notes()
        sft(parse(yaml.safe_load(recipe.read_text()), SftConfig), notes)
        assert note in notes.lines


@pytest.mark.parametrize(
    ("before", "is_noted"),
    [
        ("<|im_start|>assistant\n", True),  # as in Zephyr: no space behind the line end
        ("<|im_end|> ", False),  # as in Mistral: a space behind a special token
    ],
)
def test_a_space_of_the_tokenizer_is_noted_where_the_template_has_none(
    model_folder: Path, tmp_path: Path, before: str, is_noted: bool
) -> None:
    """As with sentencepiece, whose space is part of the first token of a text."""
    turn = "{% if m.role == 'user' %}{{ m.content }}{% else %}BEFORE{{ m.content }}<|im_end|>{% endif %}"
    opened = "{% if add_generation_prompt %}BEFORE{% endif %}".replace("BEFORE", before.rstrip(" "))
    tokenizer = chat_tokenizer(f"{{% for m in messages %}}{turn}{{% endfor %}}".replace("BEFORE", before) + opened)
    sentencepiece_spaces(tokenizer)
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+2", "completion": "3"}])
    note = load_examples(parse(recipe_of(model_folder, path, data={"eval_size": 0}), SftConfig), tokenizer).note
    assert (note is not None) == is_noted
    assert not is_noted or r"\n 3<" in str(note)


def test_a_template_that_fails_is_refused(model_folder: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+2", "completion": "3"}])
    with refused("data.chat_template", parts=["no roles"]):
        tokenizer = chat_tokenizer("{{ raise_exception('no roles') }}")
        load_examples(parse(recipe_of(model_folder, path, data={"eval_size": 0}), SftConfig), tokenizer)


def test_held_out_rows_have_a_split_of_their_own(model_folder: Path, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(SUMS)
    parts = {"train": rows.select(range(9)), "test": rows.select([10, 11]), "other": rows.select([12])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    for chosen, prompts in (({}, ["1+0=", "1+1="]), ({"eval_split": "other"}, ["1+2="])):
        recipe = recipe_of(model_folder, tmp_path / "d", data={"eval_path": str(tmp_path / "d"), **chosen})
        examples = load_examples(parse(recipe, SftConfig), make_tokenizer())
        assert [prompt.text for prompt in examples.heldout] == prompts
        assert len(examples.train) == 9


def test_half_of_a_surrogate_pair_is_refused_with_its_row(model_folder: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+2=", "completion": "\ud800"}])
    with refused("data.columns", parts=["row 1", "surrogates"]):
        load_examples(parse(recipe_of(model_folder, path, data={"eval_size": 0}), SftConfig), make_tokenizer())


def test_a_tokenizer_without_an_end_is_refused(model_folder: Path, sums: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with refused("model.path", parts=[str(model_folder)]):
        load_examples(parse(recipe_of(model_folder, sums), SftConfig), tokenizer)


def test_a_share_of_an_epoch_is_not_rounded_up_to_another_update(model_folder: Path, tmp_path: Path) -> None:
    """1.1 · 100 is a little above 110."""
    path = write_rows(tmp_path / "rows.jsonl", SUMS)
    settings = {"run": {"epochs": 1.1}, "data": {"eval_size": 0}, "optimizer": {"mini_batch_size": 10}}
    recipe = parse(recipe_of(model_folder, path, **settings), SftConfig)
    assert plan_updates(recipe, load_examples(recipe, make_tokenizer())).run.steps == 11


def test_a_conversation_that_the_template_refuses_is_shown(model_folder: Path, sums: Path) -> None:
    tokenizer = chat_tokenizer("{{ raise_exception('no roles') }}")
    with refused("data.chat_template", parts=["no roles", repr(SUMS[0]["prompt"])]):
        load_examples(parse(recipe_of(model_folder, sums, data={"eval_size": 0}), SftConfig), tokenizer)


def test_what_is_held_out_does_not_train(model_folder: Path, tmp_path: Path) -> None:
    rows = [*SUMS[:20], SUMS[3], {"prompt": "1" * 40, "completion": "2"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    held = write_rows(tmp_path / "held.jsonl", SUMS[2:9])
    recipe = parse(recipe_of(model_folder, path, data={"eval_path": str(held), "eval_size": 5}), SftConfig)
    examples = load_examples(recipe, make_tokenizer())
    assert [prompt.text for prompt in examples.heldout] == [row["prompt"] for row in SUMS[2:7]]
    assert not {prompt.id for prompt in examples.heldout} & {prompt.id for prompt in examples.train}
    counts = {"rows": 27, "train": 15, "heldout": 5, IN_HELDOUT: 6, "longer than data.max_tokens": 1}
    assert {what: count for what, count in examples.report.items() if count} == counts


@pytest.mark.parametrize(
    ("section", "key", "part"),
    [
        ("data: {columns: {prompt: q}}", "SUMS, row 1", "data.columns"),
        ("data: {eval_size: 100}", "data.eval_size", "data.eval_path"),
        ("data: {max_tokens: 2}", "data.path", "data.max_tokens"),
        ("data: {eval_size: 0, chat_template: always}", "data.chat_template", "'always'"),
        ("data: {path: no.jsonl}", "data.path", "no.jsonl"),
        ("data: {eval_path: no.jsonl}", "data.eval_path", "no.jsonl"),
        ("model: {path: null, tiny: {}}", "model.path", "null"),
        ("optimizer: {warmup_steps: 12}", "optimizer.warmup_steps", "12"),
        ("optimizer: {mini_batch_size: 91, warmup_steps: 1}", "optimizer.mini_batch_size", "90"),
        ("optimizer: {token_budget: 30}", "optimizer.token_budget", "31"),
    ],
)
def test_a_mistake_is_one_line_that_names_its_setting(
    model_folder: Path, sums: Path, section: str, key: str, part: str, dapo: Dapo
) -> None:
    path = write_sft_recipe(model_folder, sums, sums.parent / "sft.yaml", **yaml.safe_load(section))
    for dry in (["--dry-run"], []):
        dapo.refuses(f"{key.replace('SUMS', str(sums))}: {part}", "sft", path, *dry)
        assert dapo.err.count("\n") == 1


def test_a_dry_run(model_folder: Path, sums: Path, tmp_path: Path, dapo: Dapo) -> None:
    """It counts the rows and checks the layout. The recipe of the page has no setting that there is not."""
    recipe = write_sft_recipe(model_folder, sums, tmp_path / "sft.yaml")
    out = dapo("sft", recipe, "--dry-run")
    assert re.search(r"\b100\D+90\D+10\b", out)
    assert re.search(r"first example *'\d\+\d=' → '\d+'", out)
    assert parse(yaml.safe_load(snippets_of("sft")["recipe"]), SftConfig).data.judge
    for gpus, code in ((2, 0), (3, 2)):
        dapo("launch", recipe, "--sft", "--dry-run", "parallel.sequence=2", "--gpus", gpus, code=code)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("phase", "call"),
    [
        ("forward_backward", 9),  # some way behind a checkpoint
        ("evaluate", 2),  # which the next start makes up for
        ("evaluate", 4),  # also the last one
        ("log", 5),
    ],
)
def test_an_interrupted_run_equals_an_uninterrupted_one(
    phase: str, call: int, model_folder: Path, sums: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(model_folder, sums, run={"name": "whole"})
    recipe = parse(recipe_of(model_folder, sums, run={"name": "lost"}), SftConfig)
    write = RunLog.figures

    def fail(log: RunLog, step: int, *figures: Any) -> None:
        if (phase, call) == ("log", step):
            raise KeyboardInterrupt
        write(log, step, *figures)

    monkeypatch.setattr(RunLog, "figures", fail)
    with pytest.raises(KeyboardInterrupt):
        sft(recipe, AtPhase(phase, call, interrupt))
    monkeypatch.setattr(RunLog, "figures", write)
    again = sft(recipe, Notes())
    assert (again / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    one, two = (checkpoint_to_resume(folder / "checkpoints") for folder in (whole, again))
    assert one.step == two.step == 12
    for name in ("optimizer/shard-00001-model-00001-of-00001.safetensors", "model/model.safetensors"):
        ours, theirs = (load_file(found.path / name) for found in (one, two))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert steps_of(whole, "eval/loss")[-1] < 0.7 * steps_of(whole, "eval/loss")[0]


def test_a_folder_of_another_run_or_command_is_refused(model_folder: Path, sums: Path, dapo: Dapo) -> None:
    run(model_folder, sums, run={"epochs": 0.5})
    folder = run(model_folder, sums, run={"epochs": 0.6}, optimizer={"lr": 1e-3})
    assert len(steps_of(folder, "train/loss")) == 4
    with refused("data.max_tokens", parts=["32"]) as caught:
        run(model_folder, sums, run={"epochs": 1}, data={"max_tokens": 31})
    assert "run.from" not in str(caught.value)  # a setting of dapo train
    trains = make_config(run={"output_dir": str(folder.parent), "name": folder.name})
    with pytest.raises(ConfigError, match="dapo sft"):
        check_same_run(trains, folder)
    dapo("report", folder)  # which is for both
    dapo.refuses(f"{folder}: dapo sft", "eval", folder)
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

    def scorer_of(**judge: str) -> Scorer:
        return Scorer(make_config(reward={"kind": "judge", "judge": judge | prompt}))

    prompts = [make_prompt(str(number), answer=str(number)) for number in range(4)]
    answers = [[make_completion(text=str(number)) for number in range(4)] for _ in prompts]
    with FakeAPI(large) as api:
        scorer = scorer_of(url=api.url, model="large")
        scorer.judge.known.open(tmp_path)
        scorer(prompts, answers)
    fast = {"lr": 3e-3, "schedule": "constant"}
    data, often = {"judge": prompt, "eval_size": 0}, {"epochs": 80, "save_every": 0}
    folder = run(model_folder, tmp_path / "verdicts.jsonl", run=often, data=data, optimizer=fast)
    groups = scorer_of(model=str(checkpoint_to_resume(folder / "checkpoints").model))(prompts, answers)
    assert all(s.correct == (s.completion.text == g.prompt.answer) for g in groups for s in g.samples)
