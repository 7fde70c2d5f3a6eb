"""The real vLLM on a CPU, with a tiny random model: what it samples, that weights reach all of it, a whole run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders import CUTS, make_config, save_model, what_is_left
from contract import check_prefix, check_responses, check_seeds, check_stop_string, model_logprobs, prompt
from launch import torchrun
from small import SEGMENTS, events_of, small_recipe
from transformers import AutoConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM

from dapo_runner.algorithms.learner import Learner
from dapo_runner.config import Config, ModelConfig, TinyModelConfig, apply_overrides, parse
from dapo_runner.config.rollout import VLLM_TEMPERATURES
from dapo_runner.engines.vllm import VLLMEngine, engine_arguments, engine_environment
from dapo_runner.files import read_jsonl
from dapo_runner.logging.progress import Progress
from dapo_runner.loop import train
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.policy.lengths import check_lengths
from dapo_runner.policy.model import load_policy, load_tokenizer
from dapo_runner.rollout.episodes import EpisodeRunner
from dapo_runner.rollout.probe import OutOfSyncError, SyncProbe
from dapo_runner.run.folder import TINY_MODEL
from dapo_runner.tiny_model import make_model, make_tokenizer
from dapo_runner.types import Completion, Prompt, SamplingParams, make_requests

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
    engine = VLLMEngine(tiny, make_tokenizer(), tiny_config(tiny), CPU, SINGLE_PROCESS)
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1  # still in order after vLLM started
    torch.set_num_threads(threads)
    return engine


def load_learner(config: Config) -> Learner:
    return Learner(load_policy(str(config.model.path), config.model, CPU), config)


@pytest.fixture
def learner(tiny: Path) -> Learner:
    return load_learner(tiny_config(tiny))


@pytest.fixture
def engine(shared: VLLMEngine, learner: Learner) -> VLLMEngine:
    """One engine for all tests, each with the weights of the model's folder."""
    shared.update_weights(learner.policy.named_weights())
    return shared


def plain_model(learner: Learner) -> LlamaForCausalLM:
    """The policy by transformers, without packing or our kernels."""
    plain = LlamaForCausalLM._from_config(learner.policy.model.config, attn_implementation="eager").eval()
    plain.load_state_dict(learner.policy.model.state_dict())
    return plain


def policy_logprobs(learner: Learner, asked: Prompt, answer: Completion, temperature: float = 1.0) -> torch.Tensor:
    return model_logprobs(plain_model(learner), asked, answer, temperature)


def test_turns_join_the_running_batch(engine: VLLMEngine, learner: Learner) -> None:
    """No episode waits for another: the batch goes on while one of them has been answered."""
    assert engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching  # it keeps earlier turns
    runner = EpisodeRunner(make_config(env={"kind": "talkers:Talker"}), engine.tokenizer)
    prompts = [prompt(text, engine) for text in ("1+1=", "12+34=")]
    requests = make_requests(prompts, SamplingParams(n=3, max_tokens=40, seed=3))
    stop_ids, engine.stop_ids = engine.stop_ids, [*engine.stop_ids, *range(4, 12)]
    try:
        groups = runner(engine, requests, None)
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
    sampling = SamplingParams(n=4, temperature=temperature, max_tokens=12, seed=3)
    assert check_responses(engine, partial(model_logprobs, plain_model(learner)), sampling)


@pytest.mark.parametrize("check", [check_seeds, check_prefix, partial(check_stop_string, n=50)])
def test_what_every_engine_does(check: Callable[[VLLMEngine], Any], engine: VLLMEngine) -> None:
    check(engine)


@pytest.mark.parametrize("cut", CUTS)
def test_truncated_sampling(cut: dict[str, Any], engine: VLLMEngine, learner: Learner) -> None:
    """Log-probs are those of the truncated distribution, and its tokens are listed where that is asked for."""
    asked, is_masked, model = prompt("12+34=", engine), "top_k" in cut, plain_model(learner)
    sampling = SamplingParams(n=200, max_tokens=2, seed=2, sampling_mask=is_masked, **cut)
    (answers,) = engine.generate(make_requests([asked], sampling))
    first = set[int]()
    for number, answer in enumerate(answers):
        ids = torch.tensor([*asked.token_ids, *answer.token_ids.tolist()])
        first.add(int(answer.token_ids[0]))
        if number < 20:
            with torch.no_grad():
                probs = model(input_ids=ids[None]).logits[0, -answer.length - 1 : -1].softmax(-1)
            left = [what_is_left(own.tolist(), **cut) for own in probs]
            expected = [own[token] for own, token in zip(left, answer.token_ids.tolist(), strict=True)]
            assert answer.logprobs.exp().tolist() == pytest.approx(expected, abs=1e-4)
            if is_masked:
                kept = answer.support.ids.split(answer.support.counts.tolist())
                assert [set(own.tolist()) for own in kept] == [set(own) for own in left]
    assert first == set(left[0])


def test_more_tokens_than_one_batch_takes_are_prefilled_whole(engine: VLLMEngine) -> None:
    """A seeded prompt prefilled in two pieces ends vLLM on a CPU."""
    asked = [Prompt(str(i), tuple(torch.randint(5, 12, (150,)).tolist()), "", "") for i in range(80)]
    groups = engine.generate(make_requests(asked, SamplingParams(max_tokens=2)))
    assert [len(group) for group in groups] == [1] * 80


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
    with pytest.raises(OutOfSyncError, match=r"rollout\.probe:"):
        probe(engine, learner)
    change(learner)
    if keeps_prefixes:
        monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
    engine.update_weights(learner.policy.named_weights())
    with pytest.raises(OutOfSyncError) if keeps_prefixes else nullcontext():
        assert probe(engine, learner)["gap"] < 1e-4


def test_a_float32_head_is_used_and_follows_new_weights(tiny: Path) -> None:
    config = tiny_config(tiny, model={"dtype": "bfloat16", "float32_logits": True})
    engine = VLLMEngine(tiny, make_tokenizer(), config, CPU, SINGLE_PROCESS)
    learner = load_learner(config)
    change(learner)
    engine.update_weights(learner.policy.named_weights())
    hidden = torch.randn(5, SHAPE.hidden_size).bfloat16()
    (logits,) = engine.llm.apply_model(lambda model: model.logits_processor(model.lm_head, hidden))
    exact = hidden.double() @ learner.policy.head.weight.double().T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, atol=1e-4, rtol=0)


def test_sequences_beyond_the_positions_of_a_yarn_model(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own limit is `max_position_embeddings`."""
    from vllm.engine.arg_utils import EngineArgs

    shape = AutoConfig.from_pretrained(tiny)
    shape.max_position_embeddings = length = PROMPT + RESPONSE - 1
    shape.rope_parameters |= {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": length}
    shape.save_pretrained(tmp_path)
    config = tiny_config(tmp_path)
    check_lengths(config, tmp_path, download=False)
    for name, value in engine_environment(config).items():
        monkeypatch.setenv(name, value)
    arguments = engine_arguments(tmp_path, config, CPU) | {"tokenizer": str(tiny)}
    assert EngineArgs(**arguments).create_model_config().max_model_len == length + 1


def test_a_model_of_which_vllm_uses_the_class_of_transformers(tmp_path: Path) -> None:
    """vLLM changes this class, and the policy has it too."""
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape = PhiConfig(vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=1, **sizes)
    config = tiny_config(save_model(PhiForCausalLM(shape), tokenizer, tmp_path))
    learner = load_learner(config)
    engine = VLLMEngine(tmp_path, tokenizer, config, CPU, SINGLE_PROCESS)
    probe = prober(engine, learner)
    assert probe(engine, learner)["gap_max"] < 1e-4
    change(learner)
    engine.update_weights(learner.policy.named_weights())
    assert probe(engine, learner)["gap_max"] < 1e-4
    load_learner(config)  # such as a reference


def raw_run(folder: Path, start: Path | None = None, /, **run: Any) -> dict[str, Any]:
    """A run that begins with the model of the run ``start``, or with one that it warms up itself."""
    raw = small_recipe(output_dir=str(folder), eval_every=1, **run)
    if start is None:
        raw["model"]["tiny"] |= {"hidden_size": 64, "heads": 2}
    else:
        raw["model"] = {"dtype": "float32", "path": str(start / TINY_MODEL)}
    raw["rollout"] |= {"engine": "vllm", "vllm": {"kv_cache_gib": 0.25}}
    raw["optimizer"] |= {"lr": 5e-3, "mini_batch_size": None}
    return raw


def whole_run(folder: Path, start: Path | None = None, /, **run: Any) -> Path:
    return train(parse(raw_run(folder, start, **run), Config), Progress())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("whole"), steps=2)


def test_the_tokenizer_of_a_folder_is_not_that_of_mistral_common(tmp_path: Path) -> None:
    """Which comes with vLLM and has no chat template: the meaning of a recipe must not depend on it."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}="
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / "tekken.json").write_text("{}")
    assert load_tokenizer(tmp_path, ModelConfig(path="x")).chat_template == tokenizer.chat_template


def test_a_whole_run(whole: Path) -> None:
    steps = events_of(whole)
    assert len(steps) == 2
    for step in steps:
        assert step["train/tokens"] > 0
        assert step["sync/gap"] < 1e-4
        assert step["train/rollout_gap"] < 1e-4 or step["sampling/carried_in"]
        assert step["train/rollout_ess"] > 0.999 or step["sampling/carried_in"]
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize("overrides", [*SEGMENTS.values(), REPLAY])
def test_log_probs_of_a_run_are_the_learners(whole: Path, tmp_path: Path, overrides: list[str]) -> None:
    """Of several calls, and of truncated distributions."""
    run = train(parse(apply_overrides(raw_run(tmp_path, whole, steps=1), overrides), Config), Progress())
    (step,) = events_of(run)
    assert step["train/tokens"] > 0
    assert max(step["sync/gap"], step["train/rollout_gap"]) < 1e-4


def test_a_run_taken_up_again_is_the_run_that_never_stopped(whole: Path, tmp_path: Path) -> None:
    whole_run(tmp_path, whole, steps=1)
    again = whole_run(tmp_path, whole, steps=2)
    assert (again / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("share", [1, 2], ids=["two engines", "one engine of two ranks"])
def test_two_ranks(whole: Path, tmp_path: Path, python: str, share: int) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(raw_run(tmp_path, whole, steps=2)))
    done = torchrun(2, "-m", "dapo_runner", "train", recipe, f"parallel.rollout_tensor={share}", python=python)
    assert done.returncode == 0, done.stderr[-4000:]
    alone, events = (read_jsonl(folder / "metrics.jsonl") for folder in (whole, tmp_path / "small"))
    assert [(event["kind"], event["step"]) for event in events] == [(event["kind"], event["step"]) for event in alone]
    for key, value in alone[1].items():
        if key.startswith("sampling/"):
            assert events[1][key] == value, key
    for step in events_of(tmp_path / "small"):
        assert step["sync/gap"] < 1e-4
        assert step["train/tokens"] > 0
    assert not list(Path("/dev/shm").glob("*-tp:*cpushm*"))


# The last one: when this engine goes, it takes vLLM's process groups with it.
def test_a_compiled_engine_takes_new_weights(tiny: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tiny, rollout={"vllm": {"kv_cache_gib": 0.25, "enforce_eager": False}})
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)  # as `make test-vllm` sets it
    with torch._dynamo.config.patch(disable=False):
        engine = VLLMEngine(tiny, make_tokenizer(), config, CPU, SINGLE_PROCESS)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        probe = prober(engine, learner)
        assert probe(engine, learner)["gap_max"] < 1e-4
        change(learner)
        engine.update_weights(learner.policy.named_weights())
        assert probe(engine, learner)["gap_max"] < 1e-4
