"""Models that every start of a run reads again, and that must stay the same: reference, teacher, LoRA's base, judge."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from dapo_runner.config import Config, ConfigError
from dapo_runner.files import atomic_write
from dapo_runner.policy.lengths import local_file

FROZEN_FILE = "frozen_models.json"
BLOCKS, BLOCK = 64, 2**16  # of each file of weights that is read, and their bytes


def check_frozen(config: Config, start: Path, *, is_resumed: bool) -> None:
    """Compare the frozen models with those of the run's first start, or write down which they are. Raises ConfigError.

    ``start`` is the model that training started from.
    """
    reference = config.loads_reference and config.loss.reference_ema is None  # a moving one is in the checkpoint
    named = "loss.reference" if config.distillation is None else "distillation.teacher"
    models = {"model.path": start} if config.model.lora or (reference and config.reference_path is None) else {}
    if reference and config.reference_path is not None:
        models[named] = Path(config.reference_path)
    if config.reward.judge is not None and config.reward.judge.url is None:
        models["reward.judge.model"] = Path(config.reward.judge.model)
    file = config.run_dir / FROZEN_FILE
    before = json.loads(file.read_text(encoding="utf-8")) if is_resumed and file.is_file() else {}
    now = {key: digest for key, path in models.items() if (digest := sample_model(path)) is not None}
    for key in now:
        if before.get(key, now[key]) != now[key]:
            wanted = f"expected the files of {models[key]} with which {config.run_dir} began, got others"
            raise ConfigError(f"{key}: {wanted}. Restore them, or delete {file} if they are the same.")
    if before != now:
        atomic_write(file, json.dumps(before | now))


def sample_model(path: Path) -> str | None:
    """Return a digest of a model's configuration and parts of its weights; None if they are not on this machine."""
    index = local_file(path, "model.safetensors.index.json")
    shards = json.loads(index.read_bytes())["weight_map"].values() if index is not None else ["model.safetensors"]
    found = [local_file(path, name) for name in ("config.json", *sorted({*shards}))]
    files = [file for file in found if file is not None]
    if len(files) < len(found):
        return None
    digest = hashlib.sha256(files[0].read_bytes())
    for weights in files[1:]:
        size = weights.stat().st_size
        digest.update(f"{weights.name} {size}".encode())
        with weights.open("rb") as file:
            for place in range(0, size, max(1, size // BLOCKS)):
                file.seek(place)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()[:16]
