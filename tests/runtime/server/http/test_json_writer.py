"""JSON in pieces is the JSON that one piece would be, and nobody waits for more than a piece."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qserve.runtime.server.http import json_writer
from qserve.runtime.server.http.json_writer import JsonWriter, compact_json

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=40)


def lazy(node: Any) -> Any:
    """The tree with each list as an iterator."""
    if isinstance(node, dict):
        return {name: lazy(value) for name, value in node.items()}
    return iter([lazy(value) for value in node]) if isinstance(node, list) else node


@given(tree=TREES)
def test_a_tree_reads_the_same_in_any_pieces(tree: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_writer, "PIECE", 8)
        for form in (tree, lazy(tree)):
            assert asyncio.run(JsonWriter().text(form)) == compact_json(tree)
    assert compact_json(lazy(tree)) == compact_json(tree) and json.loads(compact_json(tree)) == tree


def test_others_have_their_turn_between_two_pieces() -> None:
    """Eight large answers at once: in each turn of the loop one piece of one of them is made."""

    async def longest_wait() -> float:
        writer, longest = JsonWriter(), 0.0
        items = [{"token": str(number), "logprob": -number / 7} for number in range(20_000)]
        writing = [asyncio.create_task(writer.text({"content": iter(items)})) for _ in range(8)]
        while not all(task.done() for task in writing):
            began = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)
        assert len({task.result() for task in writing}) == 1
        return longest

    assert asyncio.run(longest_wait()) < 0.1


def test_a_small_answer_tells_its_length() -> None:
    small = asyncio.run(JsonWriter().response({"text": "a"}))
    large = asyncio.run(JsonWriter().response({"text": iter("a" * json_writer.PIECE)}))
    assert small.headers["content-length"] == "12" and "content-length" not in large.headers
    assert small.headers["content-type"] == large.headers["content-type"] == "application/json"
