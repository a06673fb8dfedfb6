"""A runner that makes the engine write a given text, to test what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import torch

from qserve.runtime.engine import Engine
from qserve.runtime.runner import StepOutput

MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>")

_HEAD = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)
_TOOLS = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t.function | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
)
_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

PLAIN = _HEAD + _END
HERMES = "{# <tool_call> #}" + _TOOLS + PLAIN
LLAMA = "{# <|python_tag|> #}" + _TOOLS + PLAIN
MISTRAL = "{# [TOOL_CALLS] #}" + _TOOLS + PLAIN
MISTRAL_NAMED = "{# [TOOL_CALLS] [ARGS] #}" + _TOOLS + PLAIN
THINKING = HERMES + "{# <think> </think> #}"
THOUGHT_OPENED = HERMES + "<think>\n{% if enable_thinking is false %}</think>{% endif %}"

Start = Callable[..., openai.OpenAI]
"""Takes a chat template and options of ``ServerConfig``; a client of a server that runs until the test ends."""


class Scripted:
    """Every sequence gets ``text`` and then the end of the sequence."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens: list[int] = []

    def say(self, text: str) -> int:
        """Returns the number of its tokens, with the one that ends it."""
        ids = self._engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        self._tokens = [*ids, self._engine.tokenizer.eos_token_id]
        return len(self._tokens)

    def run(self, plan: Any, prompt_sink: Any) -> StepOutput:
        ids = tuple(sequence.request_id for sequence in plan.sequences if sequence.num_sampled)
        written = [len(self._engine._choices[key].sequence.output_token_ids) for key in ids]
        tokens = [self._tokens[min(number, len(self._tokens) - 1)] for number in written]
        greedy = torch.tensor(tokens, dtype=torch.int32)
        logits = torch.full((len(ids), self._engine.vocab_size), -50.0)
        logits[torch.arange(len(ids)), greedy.long()] = 50.0
        return StepOutput(ids, logits, greedy)
