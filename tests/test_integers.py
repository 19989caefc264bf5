import random
from math import ceil, lcm

import numpy as np
import pytest

from pipeplan.integers import ceil_div, extend, extend_array, most_in_common


def element(rng):
    """(delay, work, period) with ``work <= period`` and ties more often than chance would have them."""
    period = rng.randint(1, rng.choice([12, 10**15]))
    work = rng.choice([rng.randint(0, period), 0, period, period - 1])
    delay = rng.choice([rng.randint(0, 6 * period), rng.randint(0, 6) * period])
    return delay, work, period


ELEMENTS = [element(random.Random(seed)) for seed in range(1000)]


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


def test_extend_is_its_definition():
    for delay, work, period in ELEMENTS:
        end = -(-delay // period) * period
        assert extend(delay, work, period) == (delay + work if delay + work <= end else end + work)


def test_extend_is_the_least_delay_that_keeps_the_resource_free():
    """An element runs forward, waits ``V - work`` and runs backward: V mod period must leave room for both."""
    small = [x for x in ELEMENTS if x[1] and x[2] <= 12]
    assert len(small) > 100
    for delay, work, period in small:
        least = next(v for v in range(delay + work, delay + work + period + 1) if v % period >= work or v % period == 0)
        assert extend(delay, work, period) == least


def test_extend_grows_with_delay_and_with_work():
    rng = random.Random(0)
    for delay, work, period in ELEMENTS:
        value, more = extend(delay, work, period), rng.choice([0, 1, period, rng.randint(0, 10**6)])
        assert extend(delay + more, work, period) >= value
        assert extend(delay, min(work + more, period), period) >= value
        assert value >= delay + work
        assert ceil_div(value, period) <= ceil_div(delay, period) + 1


@pytest.mark.parametrize("count", [0, 1, 2, 20])
@pytest.mark.parametrize("one_period", [False, True])
def test_extend_array_is_extend(count, one_period):
    for start in range(0, 200, 20):
        cases = ELEMENTS[start : start + count]
        delay, work, period = (np.array([case[i] for case in cases], dtype=np.int64) for i in range(3))
        if one_period and cases:
            period = cases[0][2]
        expected = [extend(int(d), int(w), int(p)) for d, w, p in np.broadcast(delay, work, period)]
        assert extend_array(delay, work, period).tolist() == expected


def test_ceil_div_is_exact():
    rng = random.Random(0)
    for _ in range(1000):
        denominator = rng.randint(1, rng.choice([12, 10**15]))
        most = rng.choice([12, 10**12, 10**18])
        for numerator in (rng.randint(-most, most), rng.randint(-(10**3), 10**3) * denominator, most, -most):
            quotient = ceil_div(numerator, denominator)
            assert (quotient - 1) * denominator < numerator <= quotient * denominator
            assert ceil_div(np.array([numerator]), denominator)[0] == quotient
            if abs(numerator) < 2**50:
                assert ceil_div(numerator, 2) == ceil(numerator / 2)


def test_the_largest_common_multiple_of_two_numbers_with_a_limited_sum():
    for count in range(60):
        pairs = ((one, other) for one in range(1, count) for other in range(1, count - one + 1))
        assert most_in_common(count) == max((lcm(*pair) for pair in pairs), default=1)
