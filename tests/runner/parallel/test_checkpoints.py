"""What many ranks write any number of ranks goes on from: the same bits, or an error that all of them tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import pytest
import torch
from builders import save_model
from checkpoints import CASES, WRITERS, checkpoint_of
from launch import torchrun
from safetensors.torch import load_file
from test_gradients import small_model
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

from dapo_runner.checkpoint import checkpoint_to_resume
from dapo_runner.run.tiny_model import make_tokenizer

PARALLEL: dict[int, dict[str, int]] = {1: {}, 2: {"gpus": 2}, 4: {"gpus": 4, "replicate": 2}}
Plan = list[tuple[str, str, Path]]  # what to do, the case, the folder


def on_ranks(n: int, models: Path, folder: Path, plan: Plan) -> list[Any]:
    """The outcome of every line of the ``plan``."""
    if n == 1:
        return [checkpoints.DO[do](models, case, place, {}) for do, case, place in plan]
    lines = [(do, case, str(place), PARALLEL[n]) for do, case, place in plan]
    (folder / "plan.json").write_text(json.dumps(lines))
    done = torchrun(n, checkpoints.__file__, models, folder / "plan.json", folder / "out.pt")
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes: list[Any] = torch.load(folder / "out.pt")
    return outcomes


class Made(NamedTuple):
    """What was saved on one rank and on two, and what came of loading and of failing on two."""

    folder: Path
    saved: dict[tuple[int, str], dict[str, Any]]
    loaded: list[dict[str, Any]]
    failed: list[dict[str, Any]]

    @property
    def loads(self) -> Plan:
        return [("load", case, self.folder / str(n)) for n, case in self.saved]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One has tied embeddings, the other what is several tensors on the disk and one in memory, and buffers."""
    folder = tmp_path_factory.mktemp("models")
    small_model(folder / "dense", tied=True)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 8}
    counts = {"num_attention_heads": 4, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    tokenizer = make_tokenizer()
    config = Glm4MoeConfig(vocab_size=len(tokenizer), num_hidden_layers=3, **sizes, **counts)
    model = Glm4MoeForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_()
    save_model(model, tokenizer, folder / "experts")
    return folder


@pytest.fixture(scope="module")
def made(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    saves = {n: [("save", case, folder / str(n)) for case in CASES] for n in (1, 2)}
    empty = Made(folder, {(n, case): {} for n in saves for case in CASES}, [], [])
    alone = on_ranks(1, models, folder, saves[1])
    *outcomes, failed = on_ranks(2, models, folder, [*saves[2], *empty.loads, ("fail", "lora", folder / "failed")])
    saved = dict(zip(empty.saved, [*alone, *outcomes[: len(CASES)]], strict=True))
    return Made(folder, saved, outcomes[len(CASES) :], failed)


@pytest.mark.parametrize("now", PARALLEL)
def test_any_number_of_ranks_goes_on_from_any_other(made: Made, models: Path, tmp_path: Path, now: int) -> None:
    plan = made.loads if now != 4 else [*made.loads, ("save", "bfloat16", tmp_path)]
    loaded = made.loaded if now == 2 else on_ranks(now, models, tmp_path, plan)
    for ((before, name), saved), found in zip(made.saved.items(), loaded, strict=False):
        compare(found, saved, before, now, f"{name}, {before} → {now}")
    if now == 4:
        (found,) = on_ranks(1, models, tmp_path, [("load", "bfloat16", tmp_path)])
        compare(found, loaded[-1], 4, 1, "4 → 1")


def compare(found: dict[str, Any], saved: dict[str, Any], before: int, now: int, case: str) -> None:
    assert found["saved_on"] == before, case
    assert found["tensors"].keys() == saved["tensors"].keys(), case
    for name, tensor in saved["tensors"].items():
        assert tensor.dtype == found["tensors"][name].dtype, (case, name)
        assert torch.equal(tensor, found["tensors"][name]), (case, name)
    assert found["sampler"] == saved["sampler"], case
    assert found["draws"] == (saved["draws"] if before == now else saved["draws"][:1] * now), case
    for step, expected in zip(found["figures"], saved["figures"], strict=True):
        assert step == (expected if before == now else pytest.approx(expected, rel=2e-2, abs=1e-3)), case


def test_a_rank_that_cannot_write_is_told_by_all(made: Made) -> None:
    folder = made.folder / "failed"
    assert len(made.failed) == 2 * len(WRITERS)
    for attempt in made.failed:
        assert attempt["left"] == ["step_000001"]
        (message,) = set(attempt["told"])
        assert message.startswith(f"cannot write {folder / 'step_000002'}: rank 1")
        assert f"No space left on device; the last good checkpoint is {folder / 'step_000001'}" in message
    found = checkpoint_to_resume(folder)
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_that_of_one_process_in_more_files(made: Made, case: str) -> None:
    ours, theirs = (checkpoint_of(made.folder / n, case).model for n in "21")
    for file in theirs.iterdir():
        if file.suffix != ".safetensors":
            assert (ours / file.name).read_bytes() == file.read_bytes(), file.name
    parts = [load_file(ours / f"model-0000{n}-of-00002.safetensors") for n in (1, 2)]
    where = json.loads((ours / "model.safetensors.index.json").read_text())["weight_map"]
    assert where == {name: f"model-0000{n}-of-00002.safetensors" for n in (1, 2) for name in parts[n - 1]}
    assert where.keys() == load_file(theirs / "model.safetensors").keys()
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    assert max(sizes) < 0.75 * sum(sizes)
    trained = made.saved[2, case]["tensors"]
    loaded, other = (AutoModelForCausalLM.from_pretrained(path) for path in (ours, theirs))
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, trained[f"engine/{name}"]), name
    for (name, tensor), expected in zip(loaded.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(tensor, expected), name


def test_the_manifest_names_every_file_and_damage_is_found(made: Made) -> None:
    path = checkpoint_of(made.folder / "2", "lora").path
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert json.loads((path / "manifest.json").read_text()).keys() == names - {"manifest.json"}
    assert {Path(name).suffix for name in names} == {".json", ".safetensors", ".pt"}
