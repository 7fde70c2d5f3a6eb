"""What `dapo serve` adds to the workers of `vllm serve`: loading weights from a file, the dtypes of the output head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from dapo_runner.engines.transfer import checksum
from dapo_runner.engines.vllm import head_dtypes, pack_for_cpu


class Receiver:
    """Methods that `--worker-extension-cls` adds to vLLM's Worker: for ``FileTransfer`` and for ``Guard``."""

    device: Any
    model_runner: Any
    reload_weights: Any

    def load_weights_file(self, path: str, expected: str) -> None:
        """Load every parameter from a safetensors file. Raises ValueError if its checksum is not ``expected``."""
        if not Path(path).parent.exists():  # vLLM sends this text to the trainer, without paths
            raise ValueError("rollout.server.folder: a server does not see the trainer's folder. Set one for both")
        if str(checksum(Path(path))) != expected:
            raise ValueError(f"{path}: its checksum is not that of the file that was written")
        self.reload_weights(weights_iterator=iter(load_file(path).items()))
        if self.device.type == "cpu":
            pack_for_cpu(self.model_runner.get_model())

    def head_dtypes(self) -> list[str]:
        return sorted(head_dtypes(self.model_runner.get_model()))
