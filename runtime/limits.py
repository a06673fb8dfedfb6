"""``SchedulerConfig``: the limits of one scheduler; ``fit``: whether one request can ever run within them.

Knows counts of tokens, blocks and requests; does not know queues: a request that only has to wait is not refused here.
"""

from __future__ import annotations

from dataclasses import dataclass

from qserve.runtime.blocks import BlockManager
from qserve.runtime.request import Request
from qserve.runtime.sampling import RequestError

CONTEXTS_WAITING = 32


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one scheduler.

    Attributes:
        max_model_len: prompt and output tokens of a request at most (the context).
        max_num_seqs: requests running at once at most.
        max_num_batched_tokens: input tokens of one step at most, prefill chunks and decodes together.
        max_num_logits: rows of logits of one step at most; None allows ``max_num_seqs``. Drafts take what is left.
        max_waiting: new requests are refused while this many wait.
        max_waiting_tokens: new requests are refused if more prompt tokens than this would wait, unless none wait. None
            allows 32 contexts.
        num_stages: of the pipeline that runs the plans, as many of which are in flight. The decodes are divided between
            them, and a request has its newest token in one of them at most.
        priority_aging: seconds of waiting that weigh as much as one level of priority.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_logits: int | None = None
    max_waiting: int = 1024
    max_waiting_tokens: int | None = None
    num_stages: int = 1
    priority_aging: float = 10.0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_waiting", "num_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token per step"
            )
        if self.max_num_logits is not None and self.max_num_logits < self.max_num_seqs:
            raise ValueError(
                f"max_num_logits ({self.max_num_logits}) must be at least max_num_seqs ({self.max_num_seqs})"
            )
        if not 0 < self.priority_aging < float("inf"):
            raise ValueError(
                f"priority_aging must be a positive number of seconds, not {self.priority_aging}"
            )
        if self.max_waiting_tokens is not None and self.max_waiting_tokens < 1:
            raise ValueError(f"max_waiting_tokens must be at least 1, not {self.max_waiting_tokens}")

    @property
    def logits_limit(self) -> int:
        return self.max_num_logits or self.max_num_seqs

    @property
    def waiting_tokens_limit(self) -> int:
        return self.max_waiting_tokens or CONTEXTS_WAITING * self.max_model_len


def fit(request: Request, config: SchedulerConfig, blocks: BlockManager) -> None:
    """Lower the token limit of a request to the context, and an open end to the pool.

    Raises ``RequestError``, naming the field, for what can never run.
    """
    context, size, pool = config.max_model_len, blocks.block_size, blocks.num_blocks
    limit = min(request.max_total_tokens, context)
    width = request.params.n if request.params.use_beam_search else 1
    if width > config.max_num_seqs:
        raise RequestError(
            f"a beam search of width {width} needs as many running requests, --max-num-seqs allows "
            f"{config.max_num_seqs}",
            "n",
        )
    if request.num_prompt > limit:
        raise RequestError(f"the prompt has {request.num_prompt} tokens, the context {limit}", "prompt")
    needed = blocks.needed(request.num_prompt)
    if needed > pool:
        raise RequestError(
            f"the prompt of {request.num_prompt} tokens needs {needed} KV blocks of {size}, "
            f"the pool has {pool}; shorten it or raise --kv-cache-memory",
            "prompt",
        )
    room = max(1, limit - request.num_prompt)
    if request.params.max_tokens is not None and request.params.max_tokens > room:
        raise RequestError(
            f"{request.num_prompt} prompt and {request.params.max_tokens} output tokens exceed the context of "
            f"{limit} tokens; ask for max_tokens of at most {room}",
            "max_tokens",
        )
    request.limit(limit if request.params.max_tokens is not None else blocks.capacity(pool // width, limit))
    needed = width * blocks.needed(request.max_positions)
    if needed > pool and width > 1:
        raise RequestError(
            f"{width} beams of {request.num_prompt} prompt and {request.max_output_tokens} output tokens need "
            f"{needed} KV blocks of {size}, the pool has {pool}; ask for fewer or shorter ones, or raise "
            "--kv-cache-memory",
            "n",
        )
    if needed > pool:
        raise RequestError(
            f"{request.num_prompt} prompt and {request.max_output_tokens} output tokens need {needed} "
            f"KV blocks of {size}, the pool has {pool}; ask for max_tokens of at most "
            f"{blocks.capacity(pool, limit) - request.num_prompt + 1} or raise --kv-cache-memory",
            "max_tokens",
        )
