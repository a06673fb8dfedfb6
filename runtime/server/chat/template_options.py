"""``TemplateOptions``: how a request wants its messages rendered, and ``template_variables``, what a template reads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OF_RENDERER = frozenset({"messages", "raise_exception", "strftime_now"})


@dataclass(frozen=True)
class TemplateOptions:
    """``add_generation_prompt``: the prompt ends with the beginning of an answer. ``continue_final_message``: it ends
    inside the last message, which the model goes on with. ``variables``: more variables of the template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_OPTIONS = TemplateOptions()


def template_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The variables of its chat template that a request may set: those that the template reads, without those that
    come from the messages, the tokenizer and the renderer. A template that is not valid has none."""
    given = tokenizer.chat_template or ""
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
    read: set[str] = set()
    try:
        for template in given.values() if isinstance(given, dict) else [given]:
            read |= find_undeclared_variables(environment.parse(template))
    except TemplateError:  # as every request to it is told
        return frozenset()
    taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    return frozenset(read - taken - _OF_RENDERER - environment.globals.keys())


class _Generation(Extension):
    """The tag with which templates of transformers mark what the model has written; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
