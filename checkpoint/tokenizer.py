"""Loading a tokenizer with transformers, with one clear line where that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.extras import require
from qserve.checkpoint.files import read_json_object
from qserve.checkpoint.kimi_tokenizer import VOCABULARY, is_kimi, kimi_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    VOCABULARY,
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def load_tokenizer(directory: Path, *, vocab_size: Any = None) -> PreTrainedTokenizerBase:
    """The tokenizer stored in ``directory``, without network and remote code.

    Raises ``CheckpointError`` where it cannot be loaded or has more tokens than the model's ``vocab_size``.
    """
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase
    try:
        if is_kimi(directory):
            tokenizer = kimi_tokenizer(directory)
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), use_fast=True, trust_remote_code=False, local_files_only=True
            )
    except CheckpointError:
        raise
    except Exception as error:  # anything from KeyError to the Rust library's bare Exception
        if (directory / "tokenizer.model").exists() and not (directory / "tokenizer.json").exists():
            require("sentencepiece", f"{directory}: the tokenizer")
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{directory}: the tokenizer cannot be loaded ({reason})") from error
    # Added tokens may lie beyond the embedding in good models (a padding token); the base vocabulary may not.
    if isinstance(vocab_size, int) and tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model {vocab_size:,}; "
            "it belongs to another model"
        )
    return tokenizer


def plain_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of ``text``, however long, with nothing added. Special tokens in it count as such."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def leading_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that stand before the text of every request: the BOS of a tokenizer that adds it, else none."""
    text = plain_tokens(tokenizer, "a")
    request = list(tokenizer("a")["input_ids"])
    return request[: next((at for at in range(len(request)) if request[at : at + len(text)] == text), 0)]


def use_chat_template(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Replace its chat template by the one in ``file``. Raises ``UsageError`` for one that cannot render a message."""
    try:
        template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {file} cannot be read ({error})") from None
    word = "these words of a user"
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": word}], chat_template=template, add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template is a program, and may fail in any way
        line = getattr(error, "lineno", None)
        where = f"{file}, line {line}" if line else str(file)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"--chat-template {where}: a message of a user cannot be rendered ({reason})") from None
    if word not in str(text):
        raise UsageError(f"--chat-template {file} leaves out what a user says: it must render messages, as Jinja")
    tokenizer.chat_template = template


def save_portable(tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write the tokenizer's files into ``out`` under a class name that transformers 4 and 5 both know."""
    tokenizer.save_pretrained(str(out))
    path = out / "tokenizer_config.json"
    content = read_json_object(path)
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in ("name_or_path", "is_local", "local_files_only", "backend"):
        content.pop(key, None)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
