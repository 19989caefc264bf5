import pytest

from pipeplan.integers import smallest


@pytest.mark.parametrize(
    ("low", "high", "threshold"), [(1, 1, 1), (1, 100, 37), (5, 64, 64), (5, 64, 5), (0, 10**12, 123456789), (-5, 5, 0)]
)
def test_the_threshold_is_found_exactly_and_quickly(low, high, threshold):
    tried = []

    def attempt(value):
        tried.append(value)
        return f"at {value}" if value >= threshold else None

    assert smallest(attempt, low, high) == (threshold, f"at {threshold}")
    assert len(tried) <= 2 + (high - low).bit_length()
    assert all(low <= value <= high for value in tried)


@pytest.mark.parametrize(("guess", "threshold"), [(1, 1), (22, 28), (22, 3), (22, 10**15), (10**15, 7)])
def test_a_guess_that_is_near_is_not_left_far_behind(guess, threshold):
    tried = []

    def attempt(value):
        tried.append(value)
        return value if value >= threshold else None

    assert smallest(attempt, 1, 10**15, guess) == (threshold, threshold)
    assert len(tried) <= 2 + 2 * abs(threshold - guess).bit_length() + guess.bit_length()
    assert max(tried) <= max(guess, 2 * threshold)
    assert smallest(lambda value: None, 1, 10**15, guess) is None


def test_without_any():
    assert smallest(lambda value: None, 1, 100) is None
    assert smallest(lambda value: value, 7, 6) is None


def test_a_falsy_find_is_a_find():
    assert smallest(lambda value: 0, 3, 9) == (3, 0)
