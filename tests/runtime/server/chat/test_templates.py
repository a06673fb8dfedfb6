"""Chat templates of served families: our prompts are transformers' own, and the dialect is recognised.

The templates are other people's and not in this repository. ``QSERVE_TEMPLATES`` names a folder that holds them as
``*.jinja`` at any depth, such as the unpacked source packages of llama-cpp-python and vllm; without it nothing runs.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest

from qserve.runtime.engine import Engine
from qserve.runtime.sampling import RequestError
from qserve.runtime.server.chat.dialect import Dialect
from qserve.runtime.server.chat.prompts import PromptEncoder

FOLDER = os.environ.get("QSERVE_TEMPLATES")
FILES = sorted({path.name: path for path in Path(FOLDER).rglob("*.jinja")}.values()) if FOLDER else []

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "c"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS}}
]
USER: dict[str, Any] = {"role": "user", "content": "hello"}
CALLED = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Ulm"}}}
TURN: list[Any] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "content": "sun", "tool_call_id": "abcdefghi", "name": "get_weather"},
]
THOUGHT = [USER, {"role": "assistant", "content": "yes", "reasoning_content": "hm"}, USER]
CHATS: dict[str, tuple[list[Any], list[Any]]] = {
    "plain": ([USER], []),
    "system": ([{"role": "system", "content": "be brief"}, USER], []),
    "tools": ([USER], TOOLS),
    "result": (TURN, TOOLS),
    "reasoning": (THOUGHT, []),
}
# The beginning of a file's name, the format of tool calls and the tags of reasoning.
DIALECTS = {
    "ByteDance-Seed-OSS": ("seed_oss", "<seed:think>"),
    "GLM-4.6": ("glm", "<think>"),
    "GLM-4.7-Flash": ("glm", "<think>"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "<think>"),
    "Qwen-Qwen3-0.6B": ("hermes", "<think>"),
    "Qwen-Qwen2.5": ("hermes", None),
    "deepseek-ai-DeepSeek-R1-Distill": ("deepseek", "<think>"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek", "<think>"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "<think>"),
    "google-gemma-4": ("gemma4", "<|channel>thought"),
    "ibm-granite-granite-3.3": ("granite", "<think>"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "openai-gpt-oss": ("harmony", None),
    "meta-llama-Llama-3.1": ("llama", None),
    "mistralai-Mistral-Nemo": ("mistral", None),
    "mistralai-Ministral-3": ("mistral-named", "[THINK]"),
    "tool_chat_template_functiongemma": ("functiongemma", None),
    "tool_chat_template_gemma3_pythonic": ("pythonic", None),
    "tool_chat_template_llama4_pythonic": ("pythonic", None),
    "tool_chat_template_deepseekv3.": ("deepseek", None),
    "tool_chat_template_qwen3coder": ("qwen3_coder", None),
}

pytestmark = pytest.mark.skipif(not FILES, reason="QSERVE_TEMPLATES names no folder with *.jinja files")


@pytest.fixture(scope="module")
def encoder(engine: Engine) -> PromptEncoder:
    return PromptEncoder(engine.tokenizer, 1 << 20, engine.vocab_size)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_prompts_are_as_transformers_has_them(engine: Engine, encoder: PromptEncoder, path: Path) -> None:
    """Or both refuse the messages; of tools that the template does not mention, only ours tells."""
    template = path.read_text(encoding="utf-8")
    encoder._tokenizer.chat_template = template
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = template
    rendered = 0
    for messages, tools in CHATS.values():
        arguments: Any = {"tools": tools or None, "add_generation_prompt": True, "return_dict": False}
        try:
            expected = tokenizer.apply_chat_template(copy.deepcopy(messages), **arguments)
        except Exception:  # a template may fail in any way
            with pytest.raises(RequestError, match="refuses these messages"):
                encoder.chat(messages, tools)
            continue
        try:
            found = encoder.chat(messages, tools)
        except RequestError as error:
            assert "does not know tools" in str(error)
            continue
        assert tokenizer.decode(found) == tokenizer.decode(expected)
        rendered += 1
    if not rendered:  # a reranker's, or one that wants a variable of its own
        pytest.skip("this template refuses every chat, in transformers too")


@pytest.mark.parametrize(
    "path", [path for path in FILES if any(map(path.name.startswith, DIALECTS))], ids=lambda path: path.name
)
def test_dialects_are_known(engine: Engine, path: Path) -> None:
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    dialect = Dialect(tokenizer, "auto", "auto")
    format, begin = next(row for name, row in DIALECTS.items() if path.name.startswith(name))
    assert (dialect.tools.name if dialect.tools else dialect.harmony and "harmony") == format
    assert (dialect.reasoning.begin if dialect.reasoning else None) == begin
