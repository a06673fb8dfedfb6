"""PTX text read into blocks of instructions (PTX ISA, chapter 4: syntax)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SIZES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4,
         "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}  # fmt: skip
"""Bytes of a type."""


@dataclass(frozen=True)
class Instruction:
    """``opcode``: the parts between dots, without ``::cta`` and ``::cluster``, one program here; ``guard``: the
    predicate's register and what it must be. ``operands`` as they are written, a list of registers in braces as a
    tuple."""

    opcode: tuple[str, ...]
    operands: tuple[str | tuple[str, ...], ...]
    guard: tuple[str, bool] | None
    text: str


@dataclass(frozen=True)
class Parameter:
    name: str
    size: int
    align: int


@dataclass
class Program:
    """``blocks`` begin at labels and end after branches; ``labels`` says where."""

    name: str
    parameters: list[Parameter] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def read(ptx: str) -> Program:
    """The one kernel of ``ptx``."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    head = re.search(r"\.visible\s+\.entry\s+(\w+)\s*\((.*?)\)[^{]*\{", ptx, re.S)
    if head is None:
        raise ValueError("no kernel in this PTX")
    program = Program(head[1])
    for each in re.finditer(r"\.param\s+([^,]+)", head[2]):
        words = re.match(r"(?:\.align (\d+) )?\.(\w+)\s(?:[.\w\s]*?)(\w+)(?:\[(\d+)\])?\s*$", each[1].strip())
        assert words is not None, each[1]
        size = SIZES[words[2]] * int(words[4] or 1)
        program.parameters.append(Parameter(words[3], size, int(words[1] or size)))
    _Body(program).read(ptx[head.end() :])
    return program


class _Body:
    """Reads statements; names that a scope declares are told apart from those of others."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scopes: list[dict[str, str]] = []
        self.count = 0
        self.open: list[Instruction] = []
        program.blocks.append(self.open)

    def read(self, text: str) -> None:
        text = re.sub(r"^\s*\.loc\b[^\n]*$", "", text, flags=re.M)
        at = 0
        while at < len(text):
            if text[at].isspace() or text[at] == ";":
                at += 1
            elif text[at] == "{":
                end = self._closing(text, at)
                self.scopes.append(self._declared(text[at + 1 : end]))
                at += 1
            elif text[at] == "}":
                if not self.scopes:
                    return
                self.scopes.pop()
                at += 1
            elif label := re.match(r"([$\w]+):", text[at:]):
                self._begin(self._name(label[1]))
                at += label.end()
            else:
                end = text.index(";", at)
                self._statement(" ".join(text[at:end].split()))
                at = end + 1

    @staticmethod
    def _closing(text: str, at: int) -> int:
        depth = 0
        for place in range(at, len(text)):
            depth += (text[place] == "{") - (text[place] == "}")
            if depth == 0:
                return place
        raise ValueError("a scope that does not end")

    def _declared(self, body: str) -> dict[str, str]:
        """The registers and labels of a scope, under names of their own."""
        self.count += 1
        found = re.findall(r"([$\w]+):\s", body)
        for _, names in re.findall(r"\.reg\s+\.(\w+)\s+([^;]+);", body):
            found += [name.strip() for name in names.split(",")]
        return {name: f"{name}#{self.count}" for name in found}

    def _name(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _begin(self, label: str | None) -> None:
        if self.open:
            self.open = []
            self.program.blocks.append(self.open)
        if label is not None:
            self.program.labels[label] = len(self.program.blocks) - 1

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            for name in names.split(","):
                if span := re.match(r"\s*([%\w]+)<(\d+)>", name):
                    self.program.registers |= {f"{span[1]}{at}": kind[1:] for at in range(int(span[2]))}
                else:
                    self.program.registers[self._name(name.strip())] = kind[1:]
            return
        if text.startswith("."):
            return  # .pragma
        words = re.match(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", text)
        assert words is not None, text
        guard = None if words[2] is None else (self._name(words[2]), words[1] != "!")
        opcode = tuple(re.sub(r"(?<=shared)::(cta|cluster)", "", words[3]).split("."))
        operands = tuple(self._operand(each) for each in _split(words[4]))
        self.open.append(Instruction(opcode, operands, guard, text))
        if opcode[0] in ("bra", "ret", "exit"):
            self._begin(None)

    def _operand(self, text: str) -> str | tuple[str, ...]:
        if text.startswith("{"):
            return tuple(self._name(each) for each in _split(text[1:-1]))
        if text.startswith("["):
            return text
        return "|".join(self._name(each) for each in text.split("|"))


def _split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    found, depth, begin = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0:
            found.append(text[begin:at].strip())
            begin = at + 1
    if last := text[begin:].strip():
        found.append(last)
    return found
