"""``save_tiny_model``: as small as a model can be, made at random in a second, without a network.

The same call writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# As templates do that want their roles to alternate, it refuses a conversation: one that holds "refuse me".
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse me' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_model(
    out: Path, more_special: Sequence[str] = (), context: int = 512, *, width: int = 64, layers: int = 2,
    bos: bool = False,
) -> Path:  # fmt: skip
    """Random llama layers and a byte-level BPE tokenizer of about 320 tokens, in the directory ``out``.

    ``more_special``: special tokens besides those of the chat template; ``context``: tokens; ``width``: of four heads
    together; ``bos``: the tokenizer puts <|endoftext|> before every text.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *more_special]
    backend.train_from_iterator(
        ["the quick brown fox and the lazy dog, system user assistant hello world"],
        trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special
        ),
    )
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", backend.token_to_id("<|endoftext|>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", bos_token=special[0] if bos else None,
        additional_special_tokens=[*special[:2], *more_special]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(out)
    return out
