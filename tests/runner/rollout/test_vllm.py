"""The real vLLM on a CPU, with a tiny random model: what it samples, that weights reach all of it, a whole run."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders import CUTS, make_config, save_model, what_is_left
from launch import torchrun
from small import SEGMENTS, small_recipe
from transformers import LlamaForCausalLM

from dapo_runner.algorithms.learner import Learner
from dapo_runner.config import Config, ModelConfig, TinyModelConfig, apply_overrides, parse_config
from dapo_runner.config.rollout import VLLM_TEMPERATURES
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.progress import Progress
from dapo_runner.policy.model import load_policy
from dapo_runner.rollout.episodes import EpisodeRunner
from dapo_runner.rollout.probe import OutOfSyncError, SyncProbe
from dapo_runner.rollout.vllm import VLLMEngine
from dapo_runner.run.tiny_model import make_model, make_tokenizer
from dapo_runner.train import train
from dapo_runner.types import DEFAULT_OPTIONS, Completion, Prompt, SamplingParams

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"),
]
CPU = torch.device("cpu")
SHAPE = TinyModelConfig(layers=2, hidden_size=64, heads=2, intermediate_size=64)  # heads of 32: the least vLLM takes
PROMPT, RESPONSE = 160, 16
REPLAY = ["rollout.top_k=6", "rollout.top_p=0.9", "rollout.sampling_mask=true"]


def tiny_config(path: Path | None = None, **sections: Any) -> Config:
    return make_config(
        model={"tiny": None, "path": str(path), "dtype": "float32", **sections.pop("model", {})},
        rollout={
            "engine": "vllm",
            "max_prompt_tokens": PROMPT,
            "max_response_tokens": RESPONSE,
            "vllm": {"kv_cache_gib": 0.25},
            **sections.pop("rollout", {}),
        },
        reward={"overlong": {"cache_length": 4}},
        **sections,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    tokenizer = make_tokenizer()
    shape = make_model(SHAPE, tokenizer, max_positions=256).config
    shape.tie_word_embeddings = True  # where vLLM on a CPU needs help; the whole run below has a head of its own
    model = LlamaForCausalLM(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return save_model(model, tokenizer, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared(tiny: Path) -> VLLMEngine:
    threads = torch.get_num_threads()
    engine = VLLMEngine(tiny, make_tokenizer(), tiny_config(tiny), CPU)
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1  # still in order after vLLM started
    torch.set_num_threads(threads)
    return engine


@pytest.fixture
def learner(tiny: Path) -> Learner:
    return Learner(load_policy(tiny, ModelConfig(path="x", dtype="float32"), CPU), tiny_config(tiny))


@pytest.fixture
def engine(shared: VLLMEngine, learner: Learner) -> VLLMEngine:
    """One engine for all tests, each with the weights of the model's folder."""
    shared.update_weights(learner.policy.named_weights())
    return shared


def prompt(text: str, engine: VLLMEngine) -> Prompt:
    return Prompt(text, tuple(engine.tokenizer(text)["input_ids"]), text, "")


def policy_logits(learner: Learner, ids: torch.Tensor) -> torch.Tensor:
    """By transformers, without packing or our kernels."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_config(learner.policy.model.config, attn_implementation="eager")
    plain.load_state_dict(learner.policy.model.state_dict())
    with torch.no_grad():
        return plain.eval()(input_ids=ids[None], use_cache=False).logits[0]


def policy_logprobs(learner: Learner, asked: Prompt, answer: Completion, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor([*asked.token_ids, *answer.token_ids.tolist()])
    logits = policy_logits(learner, ids)
    logprobs = (logits / temperature).log_softmax(-1)
    start = len(asked.token_ids)
    return logprobs[start - 1 : -1].gather(1, ids[start:, None])[:, 0]


def test_turns_join_the_running_batch(engine: VLLMEngine, learner: Learner) -> None:
    """No episode waits for another: the batch goes on while one of them has been answered."""
    assert engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching  # it keeps earlier turns
    runner = EpisodeRunner(make_config(env={"kind": "talkers:Talker"}), engine.tokenizer)
    prompts = [prompt(text, engine) for text in ("1+1=", "12+34=")]
    sampling = [SamplingParams(n=3, max_tokens=40, seed=3, index=index) for index in range(2)]
    stop_ids, engine.stop_ids = engine.stop_ids, [*engine.stop_ids, *range(4, 12)]
    try:
        groups = runner(engine, prompts, sampling, DEFAULT_OPTIONS)
    finally:
        engine.stop_ids = stop_ids
    assert max(len(one.policy_turns) for group in groups for one in group) == 3
    for asked, group in zip(prompts, groups, strict=True):
        for one in group:
            expected = policy_logprobs(learner, asked, one)
            torch.testing.assert_close(one.logprobs[one.loss_mask], expected[one.loss_mask], atol=2e-3, rtol=1e-3)


def change(learner: Learner, scale: float = 0.2) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in learner.policy.model.parameters():
            parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)


def test_beyond_the_temperatures_of_a_configuration_vllm_does_something_else() -> None:
    from vllm import SamplingParams as Asked
    from vllm.exceptions import VLLMValidationError

    low, high = VLLM_TEMPERATURES
    for temperature in (0.0, low, high):
        assert Asked(temperature=temperature).temperature == temperature
    assert Asked(temperature=low / 2).temperature == low
    with pytest.raises(VLLMValidationError, match="temperature"):
        Asked(temperature=1.01 * high)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_completions_carry_the_policys_logprobs(engine: VLLMEngine, learner: Learner, temperature: float) -> None:
    asked = [prompt(text, engine) for text in ("1+1=", "123+45678=")]
    sampling = SamplingParams(n=4, temperature=temperature, max_tokens=12, seed=3)
    groups = engine.generate(asked, sampling)
    assert [len(group) for group in groups] == [4, 4]
    for one, group in zip(asked, groups, strict=True):
        for answer in group:
            tokens = answer.token_ids.tolist()
            assert tokens
            stopped = answer.finish_reason == "stop"
            assert stopped == (tokens[-1] in engine.stop_ids)  # the token that ends a response belongs to it
            assert stopped or len(tokens) == 12
            assert answer.text == engine.tokenizer.decode(tokens, skip_special_tokens=True)
            wanted = policy_logprobs(learner, one, answer, temperature)
            torch.testing.assert_close(answer.logprobs, wanted, atol=1e-4, rtol=1e-4)


def test_seeds_decide_and_no_two_samples_share_theirs(engine: VLLMEngine) -> None:
    asked = [prompt("12+34=", engine)] * 2
    first, again, other = (
        [c.token_ids.tolist() for group in engine.generate(asked, SamplingParams(n=8, max_tokens=16, seed=seed))
         for c in group]
        for seed in (1, 1, 2)
    )  # fmt: skip
    assert first == again
    assert first != other
    assert len({tuple(tokens) for tokens in first}) > 8  # neither samples nor equal prompts share their dice


@pytest.mark.parametrize("cut", CUTS)
def test_truncated_sampling(cut: dict[str, Any], engine: VLLMEngine, learner: Learner) -> None:
    """Log-probs are those of the truncated distribution, and its tokens are listed where that is asked for."""
    asked, is_masked = prompt("12+34=", engine), "top_k" in cut
    sampling = SamplingParams(n=200, max_tokens=2, seed=2, sampling_mask=is_masked, **cut)
    (answers,) = engine.generate([asked], sampling)
    logits = policy_logits(learner, torch.tensor(asked.token_ids))[-1]
    assert {int(answer.token_ids[0]) for answer in answers} == set(what_is_left(logits.softmax(-1).tolist(), **cut))
    for answer in answers[:20]:
        ids = torch.tensor([*asked.token_ids, *answer.token_ids.tolist()])
        probs = policy_logits(learner, ids)[-answer.length - 1 : -1].softmax(-1)
        left = [what_is_left(own.tolist(), **cut) for own in probs]
        expected = [own[token] for own, token in zip(left, answer.token_ids.tolist(), strict=True)]
        assert answer.logprobs.exp().tolist() == pytest.approx(expected, abs=1e-4)
        if is_masked:
            kept = answer.support.ids.split(answer.support.counts.tolist())
            assert [set(own.tolist()) for own in kept] == [set(own) for own in left]


def test_a_stop_string_ends_a_response_as_if_the_policy_had(engine: VLLMEngine) -> None:
    asked, sampling = [prompt("12+34=", engine), prompt("7", engine)], SamplingParams(n=50, max_tokens=12)
    whole = [answer for group in engine.generate(asked, sampling) for answer in group]
    counts = Counter(c.text[i : i + 2] for c in whole for i in range(len(c.text) - 1))
    stop = next(text for text, _ in counts.most_common() if text[0] != text[1])
    groups = engine.generate(asked, replace(sampling, stop=("no such thing", stop)))
    for one, other in zip(whole, [answer for group in groups for answer in group], strict=True):
        if stop not in one.text:
            assert (one.token_ids.tolist(), one.finish_reason) == (other.token_ids.tolist(), other.finish_reason)
            continue
        assert other.finish_reason == "stop"
        assert other.text == one.text[: one.text.index(stop) + 2]
        assert other.token_ids.tolist() == one.token_ids[: other.length].tolist()
    assert any(stop in answer.text and answer.length == 12 for group in groups for answer in group)


def test_a_prefix_is_continued_with_limits_of_its_own(engine: VLLMEngine) -> None:
    asked = prompt("12+34=", engine)
    (whole,) = engine.generate([asked], SamplingParams(temperature=0.0, max_tokens=9))
    cut = whole[0].token_ids[:4].tolist()
    prefix = Prompt("prefix", (*asked.token_ids, *cut), "", "")
    limits = [SamplingParams(temperature=0.0, max_tokens=5), SamplingParams(n=2, temperature=0.0, max_tokens=2)]
    (rest,), short = engine.generate([prefix, asked], limits)
    assert cut + rest.token_ids.tolist() == whole[0].token_ids.tolist()
    assert [c.token_ids.tolist() for c in short] == [whole[0].token_ids[:2].tolist()] * 2


def test_more_tokens_than_one_batch_takes_are_prefilled_whole(engine: VLLMEngine) -> None:
    """A seeded prompt prefilled in two pieces ends vLLM on a CPU."""
    asked = [Prompt(str(i), tuple(torch.randint(5, 12, (150,)).tolist()), "", "") for i in range(80)]
    groups = engine.generate(asked, SamplingParams(max_tokens=2))
    assert [len(group) for group in groups] == [1] * 80


def test_new_weights_arrive_whole(engine: VLLMEngine, learner: Learner) -> None:
    # Longer than a block of the prefix cache, so that a stale cache would show.
    asked = Prompt("long", tuple(prompt("12+34=", engine).token_ids) * 25, "", "")
    assert len(asked.token_ids) > 128
    sampling = SamplingParams(n=4, max_tokens=8, seed=1)
    before = engine.generate([asked], sampling)[0]
    original = {name: tensor.clone() for name, tensor in learner.policy.named_weights()}
    change(learner)
    stale = [(answer.logprobs - policy_logprobs(learner, asked, answer)).abs().mean() for answer in before]
    assert max(stale) > 0.05
    engine.update_weights(learner.policy.named_weights())
    for answer in engine.generate([asked], sampling)[0]:
        torch.testing.assert_close(answer.logprobs, policy_logprobs(learner, asked, answer), atol=1e-4, rtol=1e-4)
    engine.update_weights(original.items())
    for answer, again in zip(before, engine.generate([asked], sampling)[0], strict=True):
        assert answer.token_ids.tolist() == again.token_ids.tolist()


def prober(engine: VLLMEngine, learner: Learner, text: str = "12+34=") -> SyncProbe:
    return SyncProbe([prompt(text, engine)] * 8, learner.config)


@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_the_probe_finds_what_the_engine_does_not_have(
    keeps_prefixes: bool, engine: VLLMEngine, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has tied embeddings, of which vLLM 0.32 on its own keeps the old output head."""
    probe = prober(engine, learner, "12+34=" * 25)  # longer than a block of the prefix cache
    assert probe(engine, learner)["gap"] < 1e-4
    change(learner, 0.01)
    with pytest.raises(OutOfSyncError, match=r"rollout\.probe\.bound"):
        probe(engine, learner)
    change(learner)
    if keeps_prefixes:
        monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
    engine.update_weights(learner.policy.named_weights())
    if keeps_prefixes:
        with pytest.raises(OutOfSyncError):
            probe(engine, learner)
    else:
        assert probe(engine, learner)["gap"] < 1e-4


def test_a_float32_head_is_used_and_follows_new_weights(tiny: Path) -> None:
    config = tiny_config(tiny, model={"dtype": "bfloat16", "float32_logits": True})
    engine = VLLMEngine(tiny, make_tokenizer(), config, CPU)
    learner = Learner(load_policy(tiny, config.model, CPU), config)
    change(learner)
    engine.update_weights(learner.policy.named_weights())
    hidden = torch.randn(5, SHAPE.hidden_size).bfloat16()
    (logits,) = engine.llm.apply_model(lambda model: model.logits_processor(model.lm_head, hidden))
    exact = hidden.double() @ learner.policy.head.weight.double().T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, atol=1e-4, rtol=0)


def raw_run(folder: Path, **run: Any) -> dict[str, Any]:
    raw = small_recipe(output_dir=str(folder), eval_every=1, **run)
    raw["model"]["tiny"] |= {"hidden_size": 64, "heads": 2}
    raw["rollout"] |= {"engine": "vllm", "vllm": {"kv_cache_gib": 0.25}}
    raw["optimizer"] |= {"lr": 5e-3, "mini_batch_size": None}
    return raw


def whole_run(folder: Path, **run: Any) -> Path:
    return train(parse_config(raw_run(folder, **run)), Progress())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("whole"), steps=2)


def test_a_whole_run(whole: Path) -> None:
    steps = [event for event in read_log(whole / "metrics.jsonl") if event["kind"] == "step"]
    assert len(steps) == 2
    for step in steps:
        assert step["train/tokens"] > 0
        assert step["sync/gap"] < 1e-4
        assert step["train/rollout_gap"] < 1e-4 or step["sampling/carried_in"]
        assert step["train/rollout_ess"] > 0.999 or step["sampling/carried_in"]
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize("overrides", [*SEGMENTS.values(), REPLAY])
def test_log_probs_of_a_run_are_the_learners(tmp_path: Path, overrides: list[str]) -> None:
    """Of several calls, and of truncated distributions."""
    run = train(parse_config(apply_overrides(raw_run(tmp_path, steps=1), overrides)), Progress())
    (step,) = (event for event in read_log(run / "metrics.jsonl") if event["kind"] == "step")
    assert step["train/tokens"] > 0
    assert max(step["sync/gap"], step["train/rollout_gap"]) < 1e-4


def test_a_run_taken_up_again_is_the_run_that_never_stopped(whole: Path, tmp_path: Path) -> None:
    whole_run(tmp_path, steps=1)
    again = whole_run(tmp_path, steps=2)
    assert (again / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("share", [1, 2], ids=["two engines", "one engine of two ranks"])
def test_two_ranks(whole: Path, tmp_path: Path, share: int) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(raw_run(tmp_path, steps=2)))
    done = torchrun(2, "-m", "dapo_runner", "train", recipe, f"parallel.rollout_tensor={share}")
    assert done.returncode == 0, done.stderr[-4000:]
    alone, events = (read_log(folder / "metrics.jsonl") for folder in (whole, tmp_path / "small"))
    assert [(event["kind"], event["step"]) for event in events] == [(event["kind"], event["step"]) for event in alone]
    for key, value in alone[1].items():
        if key.startswith("sampling/"):
            assert events[1][key] == value, key
    for step in (event for event in events if event["kind"] == "step"):
        assert step["sync/gap"] < 1e-4
        assert step["train/tokens"] > 0
    assert not list(Path("/dev/shm").glob("*-tp:*cpushm*"))


# The last one: when this engine goes, it takes vLLM's process groups with it.
def test_a_compiled_engine_takes_new_weights(tiny: Path, learner: Learner) -> None:
    config = tiny_config(tiny, rollout={"vllm": {"kv_cache_gib": 0.25, "enforce_eager": False}})
    engine = VLLMEngine(tiny, make_tokenizer(), config, CPU)
    engine.generate([prompt("12+34=", engine)], SamplingParams(n=4, max_tokens=8, seed=1))
    change(learner)
    engine.update_weights(learner.policy.named_weights())
    (group,) = engine.generate([prompt("12+34=", engine)], SamplingParams(n=4, max_tokens=8, seed=1))
    for answer in group:
        wanted = policy_logprobs(learner, prompt("12+34=", engine), answer)
        torch.testing.assert_close(answer.logprobs, wanted, atol=1e-4, rtol=1e-4)
