"""``EngineConfig``: the options of an engine, with their defaults. It imports nothing heavy, so help is fast."""

from __future__ import annotations

from dataclasses import dataclass

from qserve.checkpoint.errors import UsageError
from qserve.runtime.speculative_config import SpeculativeConfig
from qserve.runtime.state_slots import snapshots_for

RERANKERS = ("auto", "qwen3")
KV_DTYPES = ("auto", "fp16", "bf16", "fp32", "int8", "fp8", "int4_per_token_head")
DTYPES = ("auto", "float16", "bfloat16", "float32")
_OTHER_NAMES = {  # of dtypes, in vLLM and torch
    "kv_cache_dtype": {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "fp8_e4m3": "fp8"},
    "dtype": {"half": "float16", "float": "float32"},
    "backend": {"vllm": "native"},
}
HEADS = ("auto", "dense", "int8")
BACKENDS = ("auto", "native", "transformers")
DISK_MEMORY = 1 << 30  # for blocks on their way to a disk or another replica and back
STEP_TOKENS = 512
GPU_STEP_TOKENS = 2048
"""On a GPU, dequantizing 4-bit weights would add 45 % to the time of the products of a step of 512 tokens, and 11 % to
one of 2,048. Larger steps gain little, and every running answer waits for them: 40 ms for an 8B model on an H200."""


@dataclass(frozen=True)
class EngineConfig:
    """How a model is served.

    Attributes:
        max_model_len: tokens of prompt and output at most; None takes what the model and the memory allow.
        max_num_seqs: requests running at once.
        max_num_batched_tokens: tokens of one step, prefill chunks and decodes together; None takes ``step_tokens``.
        max_waiting: queued choices at most; more are refused.
        max_waiting_tokens: their prompt tokens at most; None allows 32 contexts (``max_model_len``).
        kv_cache_memory: bytes of the KV cache; None takes half of the memory that weights leave free, on a GPU 0.9.
        gpu_memory_utilization: the share of the GPU's whole memory that may be used, above 0 and at most 1; on a CPU of
            the machine's. The KV cache takes what is left of it. None leaves that to ``kv_cache_memory``.
        kv_offload_memory: bytes of memory for KV blocks that the cache evicts; they come back when a prompt needs them.
            None keeps none, or 1 GiB where there is ``kv_offload_dir``.
        kv_offload_dir: directory on disk for the same, which a server that is restarted finds again. One process uses
            it at a time.
        kv_transfer: exchange KV blocks with other replicas of the model, where a router says so. They come by way of
            the memory of ``kv_offload_memory``, or 1 GiB where that is None.
        kv_offload_dir_size: bytes that it may have; the blocks used least recently make room.
        kv_cache_dtype: auto (what the checkpoint was calibrated for, else fp16), fp16, bf16, fp32,
            int8, fp8, or int4_per_token_head (4 bits, with a scale for each token and head).
        dtype: in which products compute: float16 or bfloat16 on a GPU, float32 on a CPU; auto takes what suits the
            model.
        quantization: the format in which the checkpoint must be stored, such as awq; None takes any.
        seed: of the draws of requests that have no seed of their own, int64; None draws one for each request.
        enable_prefix_caching: reuse the KV of equal prompt beginnings, and the states of hybrids.
        kernels: which executor, see ``registry.names``.
        tensor_parallel_size: ranks that share each layer, processes of this machine with a shard of its weights each;
            on GPUs each has one.
        pipeline_parallel_size: stages, each with some of the layers, which compute different steps at a time. Each has
            ``tensor_parallel_size`` ranks.
        threads: of the native kernels, for each rank; None takes the cores of this process.
        cpu_list: the CPUs that they are pinned to, one each, those of the first rank first; None leaves them to the
            system.
        generation_config: where sampling defaults come from: auto (the model's generation_config.json), vllm (nowhere),
            or the path of another such file.
        backend: what computes the model: native, our own decoder; transformers, its modules on our kernels, which serve
            more model types and are slower; auto takes native where it serves the model.
        autotune: time the configurations of the products on the GPU before anything is served, where the user's cache
            does not hold them.
        reranker: qwen3 judges pairs of texts as Qwen3-Reranker does: in its template, by "yes" over "no". auto does so
            where config.json says it (``is_original_qwen3_reranker``), since such a model looks like any other.
        head: the output head of a quantized model: int8 (auto) or dense. A dense model's is dense.
        enable_lora: serve LoRA adapters beside the model; ``lora_modules`` implies it.
        lora_modules: (name, directory) of the adapters to load at the start; a mapping is taken, too.
        max_loras: adapters loaded at once.
        max_lora_rank: the highest rank of one.
        speculative_config: how tokens are drafted, so that a step may yield several; None drafts none. Answers stay the
            same.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_waiting: int = 1024
    max_waiting_tokens: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float | None = None
    kv_offload_memory: int | None = None
    kv_offload_dir: str | None = None
    kv_offload_dir_size: int = 16 << 30
    kv_transfer: bool = False
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    seed: int | None = None
    enable_prefix_caching: bool = True
    kernels: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    threads: int | None = None
    cpu_list: tuple[int, ...] | None = None
    head: str = "auto"
    reranker: str = "auto"
    generation_config: str = "auto"
    autotune: bool = False
    backend: str = "auto"
    enable_lora: bool = False
    lora_modules: tuple[tuple[str, str], ...] = ()
    max_loras: int = 64
    max_lora_rank: int = 64
    speculative_config: SpeculativeConfig | None = None

    @property
    def logit_rows(self) -> int:
        """Rows of logits of one step: one for each request, and enough for a draft of a single one."""
        draft = self.speculative_config.num_speculative_tokens if self.speculative_config else 0
        return max(self.max_num_seqs, 1 + draft)

    @property
    def num_snapshots(self) -> int:
        """Slots for snapshots of the states that layers of a hybrid keep of a sequence, besides those of sequences."""
        return snapshots_for(self.max_num_seqs) if self.enable_prefix_caching else 0

    @property
    def num_state_slots(self) -> int:
        """Slots for the states of sequences and for snapshots of them."""
        return self.max_num_seqs + self.num_snapshots

    @property
    def num_ranks(self) -> int:
        """Processes that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_threads(self) -> int | None:
        """Threads of the native kernels of a rank, or None where no number is asked for."""
        return self.threads if self.cpu_list is None else len(self.cpu_list) // self.num_ranks

    @property
    def offload_memory(self) -> int:
        """Bytes of memory for evicted KV blocks; 0 keeps none."""
        return self.kv_offload_memory or (DISK_MEMORY if self.kv_offload_dir is not None or self.kv_transfer else 0)

    def step_tokens(self, on_gpu: bool) -> int:
        """Tokens of one step: as configured, or what suits the device, and at least as many as requests may run."""
        usual = max(GPU_STEP_TOKENS if on_gpu else STEP_TOKENS, self.max_num_seqs)
        return usual if self.max_num_batched_tokens is None else self.max_num_batched_tokens

    def __post_init__(self) -> None:
        given = self.lora_modules
        modules = tuple((str(name), str(path)) for name, path in (given.items() if isinstance(given, dict) else given))
        object.__setattr__(self, "lora_modules", modules)
        object.__setattr__(self, "enable_lora", self.enable_lora or bool(modules))
        for name, others in _OTHER_NAMES.items():
            object.__setattr__(self, name, others.get(getattr(self, name), getattr(self, name)))
        if self.kv_cache_dtype not in KV_DTYPES:
            raise UsageError(f"unknown KV cache dtype {self.kv_cache_dtype!r}: choose from {', '.join(KV_DTYPES)}")
        if self.dtype not in DTYPES:
            raise UsageError(f"unknown dtype {self.dtype!r}: choose from {', '.join(DTYPES)}")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(
                f"--gpu-memory-utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}"
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"--seed must be a 64-bit integer, not {self.seed}")
        if self.head not in HEADS:
            raise UsageError(f"unknown head {self.head!r}: choose from {', '.join(HEADS)}")
        if self.backend not in BACKENDS:
            raise UsageError(f"unknown backend {self.backend!r}: choose from {', '.join(BACKENDS)}")
        if self.reranker not in RERANKERS:
            raise UsageError(f"unknown reranker {self.reranker!r}: choose from {', '.join(RERANKERS)}")
        if self.offload_memory and not self.enable_prefix_caching:
            raise UsageError("KV blocks are found again by the prefix cache: leave out --no-prefix-caching, or "
                             "--kv-offload-memory, --kv-offload-dir and --kv-transfer")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_waiting",
            "max_waiting_tokens",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "threads",
            "max_loras",
            "max_lora_rank",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.pipeline_parallel_size > 1 and self.speculative_config:
            raise UsageError(f"--pipeline-parallel-size {self.pipeline_parallel_size}: speculative decoding cannot be "
                             "combined with several stages yet; use one")
        if self.cpu_list is not None:
            if not self.cpu_list or len(set(self.cpu_list)) < len(self.cpu_list):
                raise UsageError("--cpu-list names each CPU once, and at least one")
            if len(self.cpu_list) % self.num_ranks:
                raise UsageError(f"--cpu-list names {len(self.cpu_list)} CPUs, which must be as many for each of the "
                                 f"{self.num_ranks} ranks")
            if self.threads not in (None, len(self.cpu_list) // self.num_ranks):
                count = len(self.cpu_list)
                raise UsageError(f"--cpu-list names {count} CPUs, one for each thread: leave out --threads")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs "
                f"{self.max_num_seqs}: every running request needs one token per step"
            )
