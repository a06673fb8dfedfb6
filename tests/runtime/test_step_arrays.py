"""Plans as arrays, against a description of each step from nothing."""

from __future__ import annotations

from itertools import chain
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.runtime.step_arrays import StepArrays
from qserve.runtime.step_plan import ScheduledSequence, StepPlan

GROUPS = 2


class Tables:
    """The tables of a request, changed as a block manager does: a new tuple for a new table."""

    def __init__(self) -> None:
        self.held: tuple[tuple[int, ...], ...] = ((),) * GROUPS

    def change(self, draw: Any, blocks: int) -> None:
        kind = draw(st.sampled_from(["same", "grow", "replace", "pass", "again"]))
        block = st.integers(0, 99)
        if kind == "replace" and self.held[0]:
            table, *rest = self.held
            index = draw(st.integers(0, len(table) - 1))
            self.held = ((*table[:index], draw(block), *table[index + 1 :]), *rest)
        elif kind == "pass":
            self.held = (self.held[0], *(table[2:3] * 2 + table[2:] for table in self.held[1:]))
        elif kind == "again":
            self.held = ((),) * GROUPS
        short = max(0, *(blocks - len(table) for table in self.held))
        more = short + (kind == "grow")
        if more:
            self.held = tuple((*table, *draw(st.lists(block, min_size=more, max_size=more))) for table in self.held)


def naive(sequence: ScheduledSequence, newest: dict[str, int]) -> dict[str, Any]:
    ids = [-1 - newest[sequence.request_id] if token == -1 else token for token in sequence.token_ids]
    positions = [sequence.start + index for index in range(len(ids))]
    slots = [[table[p // 16] * 16 + p % 16 for p in positions] for table in sequence.block_tables]
    return {"ids": ids, "positions": positions, "slots": slots}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_step_is_described_as_if_it_were_the_first(data: st.DataObject) -> None:
    arrays, held = StepArrays(), {f"r{index}": Tables() for index in range(24)}
    for number in range(data.draw(st.integers(1, 8))):
        names = data.draw(st.lists(st.sampled_from(sorted(held)), min_size=1, max_size=24, unique=True))
        newest = {name: index for index, name in enumerate(sorted(held))}
        sequences = []
        for name in names:
            start, count = data.draw(st.sampled_from([(0, 1), (0, 40), (33, 1), (15, 2), (70, 1), (700, 1)]))
            tokens = [7 * start + index for index in range(count)]
            if data.draw(st.booleans()):
                tokens[-1] = -1
            tables = held[name]
            tables.change(data.draw, (start + count + 15) // 16)
            sampled = data.draw(st.integers(0, count))
            sequences.append(ScheduledSequence(name, tuple(tokens), start, tables.held, sampled, count > 1))
        steps = arrays.describe(StepPlan(number, tuple(sequences), (), ()), newest)
        want = [naive(sequence, newest) for sequence in sequences]
        ends = [sum(len(each["ids"]) for each in want[: index + 1]) for index in range(len(want))]
        rows = [range(end - sequence.num_sampled, end) for sequence, end in zip(sequences, ends)]
        assert len(steps) == GROUPS
        for group, step in enumerate(steps):
            assert step.token_ids.tolist() == list(chain(*(each["ids"] for each in want)))
            assert step.positions.tolist() == list(chain(*(each["positions"] for each in want)))
            assert step.slots.tolist() == list(chain(*(each["slots"][group] for each in want)))
            assert step.seq_start.tolist() == [0, *ends]
            assert step.logit_rows.tolist() == list(chain(*rows))
            assert step.block_tables.is_contiguous() and step.block_tables.max() < 100 and step.block_tables.min() >= 0
            assert step.block_tables.shape[1] == max(len(t) for each in sequences for t in each.block_tables)
            for row, sequence in zip(step.block_tables.tolist(), sequences):
                table = sequence.block_tables[group]
                assert tuple(row[: len(table)]) == table
