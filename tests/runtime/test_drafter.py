"""What is drafted, and how much of it: matches, trust, the time of steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.runtime.drafter import NGramDrafter
from qserve.runtime.ngrams import PLACES, NGramIndex
from qserve.runtime.request import Request, Status
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.speculative_config import SpeculativeConfig
from qserve.runtime.step_costs import StepCosts

TEXT = [*range(20, 60), 7, *range(60, 80)]


def matches(text: list[int], tokens: list[int], shortest: int, longest: int) -> list[tuple[int, int]]:
    """Every earlier place of an end of ``text`` in ``tokens``, newest first, by comparing all of them."""
    found = []
    for end in range(len(tokens) - (text is tokens), 0, -1):
        count = 0
        while count < min(end, len(text), longest) and text[-1 - count] == tokens[end - 1 - count]:
            count += 1
        if count >= shortest:
            found.append((end, count))
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 3))
def test_the_longest_of_the_newest_matches_is_found(tokens: list[int], other: list[int], shortest: int) -> None:
    index = NGramIndex(shortest, 6)
    index.extend(tokens)
    for text in (index.tokens, other):
        places = matches(text, index.tokens, shortest, 6)[:PLACES]
        longest = max((length for _, length in places), default=0)
        assert index.find(text) == next((place for place in places if place[1] == longest), (0, 0))


def drafter(method: str = "ngram", row: float = 0.1, rows: int = 64, **options: int) -> NGramDrafter:
    """One that knows that a step takes a second, and ``row`` more for each row after the first."""
    made = NGramDrafter(SpeculativeConfig.of({"method": method, **options}), rows)
    for _ in range(4):
        for count in range(1, rows + 1):
            made.timed(count, 1 + row * (count - 1))
    return made


def request(name: str = "a", prompt: list[int] | None = None, **options: str) -> Request:
    return Request(name, tuple(prompt or TEXT), SamplingParams(max_tokens=500), **options)


def test_what_followed_is_drafted_and_a_replaced_word_is_passed() -> None:
    drafts, asked = drafter(), request()
    assert not drafts.draft([asked])
    asked.output_token_ids += range(30, 40)
    guess = drafts.draft([asked])["a"]
    assert len(guess) > 3 and guess == [*range(40, 60), 7][: len(guess)]
    asked.output_token_ids += [40, 41, 99]  # in place of 42
    assert drafts.draft([asked])["a"][0] == 43
    asked.output_token_ids += [99, 98]
    assert not drafts.draft([asked])


def test_a_text_that_repeats_itself_goes_on() -> None:
    drafts, asked = drafter(row=0.0), request(prompt=[1])
    asked.output_token_ids += [5, 6, 7] * 4
    assert drafts.draft([asked])["a"] == [5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6, 7, 5]


def test_nothing_is_drafted_before_a_plain_step_was_measured_or_where_it_does_not_pay() -> None:
    asked = request()
    asked.output_token_ids += range(30, 40)
    assert not NGramDrafter(SpeculativeConfig(), 64).draft([asked])
    assert not drafter(row=1.0).draft([asked]), "a row takes as long as a step"
    assert not drafter(rows=1).draft([asked]), "there is no room"
    few, many = drafter(row=0.3), drafter(row=0.0)
    assert len(few.draft([asked])["a"]) < len(many.draft([asked])["a"]) <= 16
    assert len(drafter(row=0.0, num_speculative_tokens=3).draft([asked])["a"]) == 3


def test_who_is_never_right_is_not_drafted_for() -> None:
    drafts, chance = drafter(), random.Random(0)
    wrong, right = request("wrong", [chance.randrange(4) for _ in range(300)]), request("right", [5, 6, 7, 8] * 20)
    made = {"wrong": 0, "right": 0}
    for step in range(120):
        wrong.output_token_ids.append(chance.randrange(4))
        right.output_token_ids.append([5, 6, 7, 8][step % 4])
        found = drafts.draft([wrong, right])
        for name in made:
            made[name] += len(found.get(name, ())) if step >= 40 else 0
    assert made["right"] > 500 and made["wrong"] < 100, made


def test_more_requests_get_fewer_drafts() -> None:
    def made(count: int) -> float:
        drafts = NGramDrafter(SpeculativeConfig(), 64)
        for _ in range(4):
            for rows in range(1, 65):
                drafts.timed(rows, max(1.0, rows / 8))  # from eight rows on, a row costs as much as any other
        asked = [request(str(i), [*TEXT]) for i in range(count)]
        for each in asked:
            each.output_token_ids += range(30, 36)
        return sum(map(len, drafts.draft(asked).values())) / count

    assert made(1) > made(4) > 0 == made(8) == made(64)


def test_answers_to_the_same_tenant_and_salt_are_drafted_again() -> None:
    drafts, answer = drafter("suffix"), [*range(100, 140)]
    first = request("first", tenant="x")
    first.output_token_ids += answer
    drafts.draft([first])
    first.status = Status.FINISHED
    for tenant, salt, found in (("x", "", True), ("y", "", False), ("x", "other", False)):
        asked = request(f"{tenant}{salt}", [1, 2], tenant=tenant, cache_salt=salt)
        drafts.draft([asked])
        asked.output_token_ids += answer[:3]
        assert bool(drafts.draft([asked])) is found
        asked.status = Status.FINISHED


def test_answers_are_forgotten() -> None:
    drafts = drafter("suffix", suffix_decoding_max_cached_requests=4)
    for number in range(12):
        asked = request(str(number), [1, 2])
        asked.output_token_ids += [1000 + 10 * number + i for i in range(9)]
        drafts.draft([asked])
        asked.status = Status.FINISHED
    for number, found in ((0, False), (10, True)):
        asked = request("new", [1, 2])
        asked.output_token_ids += [1000 + 10 * number + i for i in range(4)]
        assert bool(drafts.draft([asked])) is found


def test_a_pace_changes_no_ratio_and_a_slow_moment_is_forgotten() -> None:
    costs, chance = StepCosts(32), random.Random(1)
    true = [0.0, *(1 + 0.1 * rows for rows in range(1, 33))]
    for step in range(2000):
        rows = chance.choice((1, 3, 5, 9, 17))
        costs.add(rows, true[rows] * (1 if step < 1000 else 3) * (1 + 0.1 * chance.random()))
        if step % 50 == 0:
            costs.add(5, 30.0)
    table = costs.table()
    assert len(table) == 33 and table == sorted(table) and costs.knows(1) and not costs.knows(2)
    assert table[9] / table[1] == pytest.approx(true[9] / true[1], rel=0.2)


def test_a_number_of_rows_that_was_not_measured_lately_is_not_known() -> None:
    costs = StepCosts(8)
    for _ in range(3):
        costs.add(1, 1.0)
        costs.add(4, 100.0)
    assert costs.knows(4) and costs.table()[4] == 100.0
    for _ in range(600):
        costs.add(1, 1.0)
    assert not costs.knows(4) and costs.table()[4] < 2
