"""Checkpoints: everything that a run needs to resume with bit-identical results.

    checkpoints/step_000040/
        model/         a transformers model with adapters merged in: `dapo eval`, vLLM and others can load it
        adapter/       with model.lora: the adapters in peft's format
        optimizer/     of every trained weight the float32 master, exp_avg, exp_avg_sq and step, also of a critic and
                       of a moving reference; written by torch.distributed.checkpoint as safetensors. One process
                       with model.dtype=float32 leaves out the masters, which are the weights of model/
        state.pt       step, sampler (cursor, left-over groups), loss scales of float16, and the random generators
                       of every rank
        manifest.json  size and SHA-256 of every other file, written last

A checkpoint is written to a temporary folder, synced to the disk and renamed, so it is complete or absent. Loading runs
no code: it uses safetensors, JSON and torch's weights-only unpickler. Any number of ranks can resume from it.
"""

from dapo_runner.checkpoint.files import Checkpoint, CheckpointError, find_checkpoints, latest_checkpoint
from dapo_runner.checkpoint.saving import BackgroundSaves, load_checkpoint, save_checkpoint
from dapo_runner.checkpoint.snapshot import keeping_generators, take_snapshot

__all__ = [
    "BackgroundSaves", "Checkpoint", "CheckpointError", "find_checkpoints", "keeping_generators", "latest_checkpoint",
    "load_checkpoint", "save_checkpoint", "take_snapshot",
]  # fmt: skip
