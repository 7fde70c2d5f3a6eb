"""Checkpoints: all a run needs to go on as if it had never stopped, or nothing at all.

    checkpoints/step_000040/
        model/                 transformers' format, adapters merged in: `dapo eval`, vLLM and anything else can load it
        adapter/               with model.lora: the adapters alone, in peft's format
        optimizer.safetensors  per parameter: exp_avg, exp_avg_sq, step; float32 master of half precision
                               and under names of their own all weights of a critic and of a reference that moves
        optimizer/             in its place where ranks share the weights: the same and all masters, as
                               torch.distributed.checkpoint lays them out in safetensors, the shards of each rank apart
        state.pt               step, sampler (cursor, groups carried over), every random generator, of every rank
        manifest.json          size and SHA-256 of every other file, written last

A checkpoint is written beside its place, forced to the disk and renamed: whatever moment the power goes, the
folder of that name is whole or absent. One that was damaged since is refused, not passed over. Loading runs no
code: safetensors, JSON, and torch's weights-only unpickler. Any number of ranks goes on from what any other number
wrote, with the same weights, optimizer and groups.
"""

from dapo_runner.checkpoint.files import (
    Checkpoint,
    CheckpointError,
    checkpoint_to_resume,
    copy_checkpoint,
    damage_of,
    find_checkpoints,
    is_whole,
    latest_checkpoint,
    writing,
)
from dapo_runner.checkpoint.saving import BackgroundSaves, load_checkpoint, save_checkpoint
from dapo_runner.checkpoint.state import Resumable, take_snapshot

__all__ = [
    "BackgroundSaves",
    "Checkpoint",
    "CheckpointError",
    "Resumable",
    "checkpoint_to_resume",
    "copy_checkpoint",
    "damage_of",
    "find_checkpoints",
    "is_whole",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "take_snapshot",
    "writing",
]
