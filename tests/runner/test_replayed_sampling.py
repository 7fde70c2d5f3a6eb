"""Responses sampled with top-p, top-k or min-p, and an update that compares them with what they were sampled from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import CUTS, backward, make_config, pack_mini_batch, random_sequences, what_is_left, with_lists
from small import small_recipe
from test_train import Notes
from torch import Tensor

from dapo_runner.algorithms.advantage import make_sequence
from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.mini_batch import local_sampling_mask
from dapo_runner.algorithms.packing import pack
from dapo_runner.config import Config, ConfigError, ModelConfig, TreeShape, parse_config
from dapo_runner.config.settings import cautions
from dapo_runner.logging.metrics import read_log
from dapo_runner.policy.model import Policy, load_model, load_tokenizer
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.rollout.segments import add_prefix, grow_trees, join_continuation
from dapo_runner.rollout.vllm import read_support
from dapo_runner.run.steps import Run
from dapo_runner.train import train
from dapo_runner.types import Completion, Group, Prompt, Sample, SamplingParams, Sequence, TruncatedSupport, Verdict

CPU = torch.device("cpu")
MODEL = ModelConfig(path="x", dtype="float32")


@pytest.fixture
def engine(model_folder: Path) -> HFEngine:
    return HFEngine(load_model(model_folder, MODEL, CPU, "sdpa"), load_tokenizer(model_folder, MODEL), 64)


def prompt(text: str, engine: HFEngine) -> Prompt:
    return Prompt(text, tuple(engine.tokenizer(text)["input_ids"]), text, "")


def lists_of(kept: TruncatedSupport) -> list[list[int]]:
    return [part.tolist() for part in kept.ids.split(kept.counts.tolist())]


def check_completion(engine: HFEngine, asked: Prompt, completion: Completion, cut: dict[str, Any]) -> None:
    """Against one pass over the whole sequence and the definition of the cuts."""
    n = completion.length
    with torch.no_grad():
        ids = torch.tensor([*asked.token_ids, *completion.token_ids.tolist()])
        probs = engine.model(input_ids=ids[None], use_cache=False).logits[0, -n - 1 : -1].softmax(-1)
    assert completion.support is not None
    assert len(completion.support.counts) == n
    for place, kept in enumerate(lists_of(completion.support)):
        left = what_is_left(probs[place].tolist(), **cut)
        assert set(kept) == (set(left) if len(left) < probs.shape[-1] else set())
        share = left[int(completion.token_ids[place])]
        assert float(completion.logprobs[place].exp()) == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize("cut", [*CUTS, {"top_p": 0.6}])
def test_the_engine_says_what_it_kept(engine: HFEngine, cut: dict[str, Any]) -> None:
    asked = [prompt("3+4=", engine), prompt("12+5=", engine)]
    sampling = SamplingParams(n=4, max_tokens=6, sampling_mask=True, **cut)
    plain = engine.generate(asked, replace(sampling, sampling_mask=False))
    for one, answers, same in zip(asked, engine.generate(asked, sampling), plain, strict=True):
        for completion, other in zip(answers, same, strict=True):
            assert torch.equal(completion.token_ids, other.token_ids)
            assert other.support is None
            check_completion(engine, one, completion, cut)


def test_rows_that_nothing_was_cut_off_have_no_lists(engine: HFEngine) -> None:
    cut = SamplingParams(n=2, max_tokens=4, top_k=3, sampling_mask=True)
    for sampling, expected in ((cut, 3), (replace(cut, top_k=None), 0)):
        (answers,) = engine.generate([prompt("3+4=", engine)], sampling)
        for completion in answers:
            assert completion.support is not None
            assert set(completion.support.counts.tolist()) == {expected}


def test_trees_and_continuations_carry_the_lists(engine: HFEngine) -> None:
    asked, sampling = prompt("12+34=", engine), SamplingParams(max_tokens=6, top_k=4, sampling_mask=True, index=0)
    shape = TreeShape(branching=(2, 2), tokens=2)
    (leaves,) = grow_trees(engine.generate, engine.tokenizer, [asked], [sampling], shape)
    for leaf in leaves:
        check_completion(engine, asked, leaf, {"top_k": 4})
    begun = add_prefix(asked, torch.tensor([5, 6]))
    ((rest,),) = engine.generate([begun], sampling)
    whole = join_continuation(begun, rest, engine.tokenizer)
    assert whole.support is not None
    assert lists_of(whole.support)[:2] == [[], []]
    assert rest.support is not None
    assert lists_of(whole.support)[2:] == lists_of(rest.support)


def test_micro_batches_keep_every_tokens_list() -> None:
    sequences = with_lists(random_sequences(12), 20)
    seen = 0
    for batch in pack(sequences, 40):
        assert batch.support_ids is not None
        assert batch.support_counts is not None
        lists = lists_of(TruncatedSupport(batch.support_ids, batch.support_counts))
        assert len(lists) == batch.n_positions
        for place, index in enumerate(batch.sequence_ids.tolist()):
            kept = sequences[index].support
            own = lists[batch.cu_seqlens[place] : batch.cu_seqlens[place + 1]]
            expected = [[]] * len(own) if kept is None else lists_of(kept)[1:]
            assert own == expected
            seen += sum(map(len, own))
    assert seen > 0


def test_positions_are_shared_out_with_their_lists() -> None:
    (batch,) = pack(with_lists(random_sequences(6), 20), 1000)
    whole = local_sampling_mask(batch, policy_on(None))
    assert whole is not None
    offsets = whole.offsets.tolist()
    n = batch.n_positions // 2
    for rank in range(2):
        part = local_sampling_mask(batch, policy_on(SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)))
        assert part is not None
        assert len(part.offsets) == n + 1
        assert part.offsets.diff().tolist() == whole.offsets.diff()[rank * n : (rank + 1) * n].tolist()
        assert part.ids.tolist() == whole.ids[offsets[rank * n] : offsets[(rank + 1) * n]].tolist()


def policy_on(group: Any) -> Any:
    return SimpleNamespace(device=CPU, world=SimpleNamespace(sequence_group=group))


def test_the_update_is_that_of_what_was_kept(policy: Policy, engine: HFEngine) -> None:
    """Loss and log-probs by hand, whatever the packing."""
    vocab = policy.head.weight.shape[0]
    sequences = [s for s in with_lists(random_sequences(10, seed=2), vocab) if s.mask[1:].any()]
    learner = Learner(policy, make_config(loss={"old_logprobs": "rollout"}))
    found: list[tuple[float, dict[str, Tensor]]] = []
    for budget in (64, 1024):
        mini = pack_mini_batch(learner, sequences, budget)
        outs = [(batch, backward(learner, mini, batch)) for batch in mini.micro_batches]
        loss = sum(float(out.loss.detach()) for _, out in outs)
        found.append((loss, {name: p.grad.clone() for name, p in policy.model.named_parameters()}))
        policy.model.zero_grad()
        for batch, out in outs:
            own = learner.logprobs(batch)
            torch.testing.assert_close(own, out.logprobs, atol=1e-6, rtol=1e-6)
            for place, index in enumerate(batch.sequence_ids.tolist()):
                part = slice(*batch.cu_seqlens[place : place + 2].tolist())
                expected = by_hand(engine, sequences[index])
                torch.testing.assert_close(own[part], expected, atol=1e-5, rtol=1e-5)
    (a, grads), (b, same) = found
    assert a == pytest.approx(b, abs=1e-6)
    for name, grad in grads.items():
        assert (same[name] - grad).norm() <= 1e-5 * grad.norm(), name


@torch.no_grad()
def by_hand(engine: HFEngine, sequence: Sequence) -> Tensor:
    logits = engine.model(input_ids=sequence.token_ids[None], use_cache=False).logits[0, :-1]
    lists = [[]] * sequence.length if sequence.support is None else lists_of(sequence.support)
    for row, kept in zip(logits, lists[1:], strict=True):
        if kept:
            row[[token for token in range(len(row)) if token not in kept]] = -torch.inf
    logprobs = logits.log_softmax(-1).gather(1, sequence.token_ids[1:, None])[:, 0]
    return torch.where(sequence.mask[1:], logprobs, 0.0)


def test_sequences_have_the_lists_of_their_responses(engine: HFEngine) -> None:
    asked = prompt("3+4=", engine)
    ((completion,),) = engine.generate([asked], SamplingParams(max_tokens=4, top_k=3, sampling_mask=True))
    sample = Sample(completion, Verdict(True), 1.0)
    sequence = make_sequence(Group(asked, (sample,), 2), sample, 1.0, 0, 0)
    assert completion.support is not None
    assert sequence.support is not None
    assert lists_of(sequence.support) == [[]] * len(asked.token_ids) + lists_of(completion.support)


def run_in(folder: Path) -> Config:
    """With a reference, and groups that are carried over."""
    recipe = small_recipe(output_dir=str(folder), steps=3, eval_every=0)
    recipe["rollout"] |= {"top_p": 0.9, "top_k": 6, "sampling_mask": True}
    return parse_config(recipe | {"loss": {"overrides": {"kl_coef": 0.01}}})


def test_a_run_replays_it_and_one_that_stopped_on_the_way_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    whole = train(run_in(tmp_path / "whole"), notes)
    assert not any("part of the distribution" in line for line in notes.lines)
    steps = [event for event in read_log(whole / "metrics.jsonl") if event["kind"] == "step"]
    assert all(event["sync/gap"] < 1e-5 for event in steps)
    assert steps[0]["train/rollout_gap"] < 1e-5
    end_step = Run.end_step

    def lost(self: Run, step: int) -> None:
        end_step(self, step)
        if step == 1:
            raise KeyboardInterrupt

    config = run_in(tmp_path / "lost")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "end_step", lost)
        with pytest.raises(KeyboardInterrupt):
            train(config, Notes())
    again = train(config, Notes())
    assert (again / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_vllms_words_for_it() -> None:
    """The sampled token comes first and once more among the likeliest; what was cut off has −∞. In the last step the
    sampled one is a tie beyond those that were asked for.
    """
    flat = SimpleNamespace(
        token_ids=[7, 3, 7, 9, 3, 3, 9, 7, 5, 1, 2, 4],
        logprobs=[-1.2, -0.4, -1.2, -torch.inf, 0.0, 0.0, -torch.inf, -torch.inf, -2.0, -0.5, -1.4, -2.0],
        start_indices=[0, 4, 8],
    )
    assert [sorted(kept) for kept in lists_of(read_support(flat))] == [[3, 7], [3], [1, 2, 4, 5]]


def test_configurations() -> None:
    cut = {"top_p": 0.9, "sampling_mask": True}
    assert not any(word.startswith("rollout.top_p") for word in cautions(make_config(rollout=cut)))
    for sections, words in (
        ({"rollout": {"sampling_mask": True}}, "rollout.sampling_mask: "),
        ({"rollout": {**cut, "engine": "vllm"}}, "rollout.top_k: "),
        ({"rollout": cut, "preference": {}}, "preference: .*rollout.sampling_mask"),
        ({"rollout": {"top_p": 0.9, "max_mismatch_kl": 0.1}}, "rollout.sampling_mask: "),
        ({"rollout": {"top_k": 5, "correction": {"mask": "token"}}}, "rollout.sampling_mask: "),
    ):
        with pytest.raises(ConfigError, match=words):
            make_config(**sections)
    make_config(rollout={**cut, "engine": "vllm", "top_k": 20})
    make_config(rollout={**cut, "max_mismatch_kl": 0.1, "correction": {"mask": "token"}})
