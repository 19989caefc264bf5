from math import ceil, lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.integers import ceil_div, extend, extend_array, most_in_common

REPEATABLE = settings(deadline=None, derandomize=True)


@st.composite
def elements(draw):
    """(delay, work, period) with ``work <= period`` and ties more often than chance would have them."""
    period = draw(st.one_of(st.integers(1, 12), st.integers(1, 10**15)))
    work = draw(st.one_of(st.integers(0, period), st.sampled_from([0, period, period - 1])))
    delay = draw(st.one_of(st.integers(0, 6 * period), st.integers(0, 6).map(lambda k: k * period)))
    return delay, work, period


@pytest.mark.parametrize(
    ("delay", "work", "period", "expected"),
    [
        (0, 3, 5, 3),  # the last stage opens group 1
        (3, 2, 5, 5),  # fills it exactly: a tie stays
        (3, 3, 5, 8),  # doesn't fit: group 2 begins at its start
        (5, 5, 5, 10),
        (5, 0, 5, 5),
        (6, 4, 5, 10),
        (6, 5, 5, 15),
    ],
)
def test_examples(delay, work, period, expected):
    assert extend(delay, work, period) == expected


@REPEATABLE
@given(elements())
def test_extend_is_its_definition(element):
    delay, work, period = element
    group = -(-delay // period)
    assert extend(delay, work, period) == (delay + work if delay + work <= group * period else group * period + work)


@REPEATABLE
@given(elements())
def test_extend_is_the_least_delay_that_keeps_the_resource_free(element):
    """An element runs forward, waits ``V - work`` and runs backward: V mod period must leave room for both."""
    delay, work, period = element
    if work == 0 or period > 12:
        return
    least = next(v for v in range(delay + work, delay + work + period + 1) if v % period >= work or v % period == 0)
    assert extend(delay, work, period) == least


@REPEATABLE
@given(elements(), st.integers(0, 10**6), st.integers(0, 10**6))
def test_extend_grows_with_delay_and_with_work(element, more_delay, more_work):
    delay, work, period = element
    value = extend(delay, work, period)
    assert extend(delay + more_delay, work, period) >= value
    assert extend(delay, min(work + more_work, period), period) >= value
    assert value >= delay + work
    assert ceil_div(value, period) <= ceil_div(delay, period) + 1


@REPEATABLE
@given(st.lists(elements(), max_size=20), st.booleans())
def test_extend_array_is_extend(cases, one_period):
    delay, work, period = (np.array([case[i] for case in cases], dtype=np.int64) for i in range(3))
    if one_period and cases:
        period = cases[0][2]
    expected = [extend(int(d), int(w), int(p)) for d, w, p in np.broadcast(delay, work, period)]
    assert extend_array(delay, work, period).tolist() == expected


@REPEATABLE
@given(st.integers(-(10**18), 10**18), st.integers(1, 10**15))
def test_ceil_div_is_exact(numerator, denominator):
    quotient = ceil_div(numerator, denominator)
    assert (quotient - 1) * denominator < numerator <= quotient * denominator
    assert ceil_div(np.array([numerator]), denominator)[0] == quotient
    if abs(numerator) < 2**50:
        assert ceil_div(numerator, 2) == ceil(numerator / 2)


def test_the_largest_common_multiple_of_two_numbers_with_a_limited_sum():
    for count in range(60):
        pairs = ((one, other) for one in range(1, count) for other in range(1, count - one + 1))
        assert most_in_common(count) == max((lcm(*pair) for pair in pairs), default=1)
