"""Small real models, made once per session; engines over them, and fake servers that end with their test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from builders import TINY, save_model
from fake_server import FakeServer
from forked_python import forked_python
from served import Fleet, HashEngine
from small import Dapo, config_in

from dapo_runner.config import ModelConfig
from dapo_runner.engines import pool
from dapo_runner.engines.hf import HFEngine
from dapo_runner.logging.run_log import RunLog
from dapo_runner.policy.model import Policy, load_model, load_policy
from dapo_runner.tiny_model import ensure_tiny_model, make_model, make_tokenizer
from docs.glossary import is_documented


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "parallel":
            item.add_marker(pytest.mark.ranks)


@pytest.fixture(autouse=True)
def _only_documented_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a run that logs a metric without a row in docs/metrics.md."""
    write = RunLog.figures

    def check(self: RunLog, step: int, kind: str, figures: Mapping[str, float]) -> None:
        assert [key for key in figures if not is_documented(key)] == []
        write(self, step, kind, figures)

    monkeypatch.setattr(RunLog, "figures", check)


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run draws none at its end, which takes as long as a small run. The one of test_cli.py begins before this."""
    monkeypatch.setattr("dapo_runner.commands.train.write_report", lambda folder: None)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A program in place of ``sys.executable`` whose processes have their imports behind them."""
    with forked_python(tmp_path_factory.mktemp("python")) as program:
        yield program


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights, large enough that its distributions are far from uniform."""
    torch.manual_seed(7)
    tokenizer = make_tokenizer()
    model = make_model(TINY, tokenizer, max_positions=256)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return save_model(model, tokenizer, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the small recipe after its warm-up, which takes longer than the run: runs start from it."""
    folder = tmp_path_factory.mktemp("start")
    return ensure_tiny_model(config_in(folder), folder / "model", print)


@pytest.fixture
def policy(model_folder: Path) -> Policy:
    return load_policy(model_folder, ModelConfig(path="x", dtype="float32"), torch.device("cpu"))


@pytest.fixture
def servers(model_folder: Path) -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeServer(model_folder)) for _ in range(2)]


@pytest.fixture
def dapo(capsys: pytest.CaptureFixture[str]) -> Dapo:
    return Dapo(capsys)


@pytest.fixture
def engine(model_folder: Path) -> HFEngine:
    model = ModelConfig(path="x", dtype="float32")
    return HFEngine(load_model(model_folder, model, torch.device("cpu"), "sdpa"), make_tokenizer(), 64)


@pytest.fixture
def fleet(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Servers that compute nothing, and are tried again soon."""
    monkeypatch.setattr(pool, "REST", 0.01)
    servers = [FakeServer(model_folder, HashEngine) for _ in range(2)]
    fleet = Fleet(model_folder, servers, tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
def model_fleet(model_folder: Path, servers: list[FakeServer], tmp_path: Path) -> Iterator[Fleet]:
    """Servers that sample from a small model."""
    fleet = Fleet(model_folder, servers, tmp_path)
    yield fleet
    fleet.close()
