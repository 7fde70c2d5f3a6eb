"""What docs/verl.md says of verl's own dynamic sampling and of its treatment of overlong responses."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

_NEEDED = "verl's import chain: pip install --no-deps -r tests/integrations/requirements-verl.txt"
dapo = pytest.importorskip("verl.experimental.reward_loop.reward_manager.dapo", reason=_NEEDED, exc_type=ImportError)

from omegaconf import OmegaConf  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "verl.md").read_text(encoding="utf-8")


def verl_file(name: str) -> str:
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return (Path(spec.submodule_search_locations[0]) / name).read_text(encoding="utf-8")


def settings() -> list[str]:
    (snippet,) = re.findall(r"<!-- dapo -->\n```\n(.+?)```", PAGE, re.DOTALL)
    return snippet.split()


def test_the_settings_exist_in_verls_configuration() -> None:
    """Those with a plus are new keys, as Hydra wants it."""
    config = OmegaConf.create(verl_file("trainer/config/_generated_ppo_trainer.yaml"))
    missing = object()
    for setting in settings():
        key = setting.split("=")[0]
        found = OmegaConf.select(config, key.lstrip("+"), default=missing)
        assert (found is missing) == key.startswith("+"), key
    assert config.trainer.use_v1
    assert config.trainer.v1.trainer_mode == "sync"
    assert config.algorithm.filter_groups.max_num_gen_batches == 0


def test_what_reads_the_filter() -> None:
    """verl's buffer does not know the limit of rounds, its synchronous one discards surplus groups; the legacy trainer
    does not filter.
    """
    buffer = verl_file("trainer/ppo/v1/replay_buffer.py")
    assert "max_inflight_gen_batches" in buffer
    assert "max_num_gen_batches" not in buffer
    synchronous, asynchronous = buffer.split("class ReplayBufferAsync")
    assert "discarded_surplus_samples" in synchronous
    assert "discarded_surplus_samples" not in asynchronous
    assert "filter_groups" not in verl_file("trainer/ppo/ray_trainer.py") + verl_file("trainer/main_ppo_v0.py")


@pytest.mark.parametrize("n_tokens", [1, 16384, 16385, 18432, 20480, 24576])
def test_the_punishment_is_eq_13_up_to_its_length(n_tokens: int) -> None:
    """And the metric ``acc`` is the score without it."""
    config = OmegaConf.from_dotlist([setting.lstrip("+") for setting in settings()])
    assert config.reward.reward_manager.name == "dapo"
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "answer")
    manager = dapo.DAPORewardManager(config, tokenizer, lambda **_: 0.5)
    found = manager.loop.run_until_complete(manager.run_single(response(n_tokens)))
    punishment = min(0.0, (20480 - 4096 - n_tokens) / 4096)
    assert punishment >= -1 or n_tokens > 20480
    assert float(found["reward_score"]) == pytest.approx(0.5 + punishment)
    assert found["reward_extra_info"][config.algorithm.filter_groups.metric] == 0.5


def response(n_tokens: int) -> Any:
    from verl import DataProto

    ids = torch.zeros(1, n_tokens, dtype=torch.long)
    columns = {"data_source": ["x"], "reward_model": [{"ground_truth": "1"}], "extra_info": [{}]}
    tensors = {"responses": ids, "attention_mask": torch.ones(1, 4 + n_tokens, dtype=torch.long)}
    return DataProto.from_dict(tensors, columns)
