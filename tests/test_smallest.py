import pytest

from pipeplan.integers import smallest


@pytest.mark.parametrize(
    ("low", "high", "threshold"),
    [(1, 1, 1), (1, 100, 37), (5, 64, 64), (5, 64, 5), (0, 10**12, 123456789), (-5, 5, 0)],
)
def test_the_threshold_is_found_exactly_and_quickly(low, high, threshold):
    tried = []

    def attempt(value):
        tried.append(value)
        return f"at {value}" if value >= threshold else None

    assert smallest(attempt, low, high) == (threshold, f"at {threshold}")
    assert len(tried) <= 2 + (high - low).bit_length()
    assert all(low <= value <= high for value in tried)


def test_without_any():
    assert smallest(lambda value: None, 1, 100) is None
    assert smallest(lambda value: value, 7, 6) is None


def test_a_falsy_find_is_a_find():
    assert smallest(lambda value: 0, 3, 9) == (3, 0)
