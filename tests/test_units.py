import random
from fractions import Fraction

import pytest

from pipeplan.errors import BadInput
from pipeplan.names import format_devices
from pipeplan.units import (
    BANDWIDTHS,
    LARGEST,
    SIZES,
    TIMES,
    exact_bandwidth,
    exact_bytes,
    exact_time,
    format_bandwidth,
    format_bytes,
    format_ns,
    ms_to_ns,
    parse_bandwidth,
    parse_bytes,
    parse_time,
)


def counts():
    """Counts of any length, around every power of ten, and whole numbers of every unit."""
    rng = random.Random(0)
    found = [0, LARGEST, *(rng.randint(0, 10 ** rng.randint(0, 18)) for _ in range(500))]
    found += [10**n + step for n in range(18) for step in (-1, 0, 1)]
    found += [rng.choice([1, rng.randint(0, 800)]) * unit for unit in SIZES.values() for _ in range(40)]
    return [x for x in found if x <= LARGEST]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16GB", 16 * 10**9), ("16GiB", 16 * 2**30), ("1.5GiB", 3 * 2**29), (" 16 GB ", 16 * 10**9), ("0", 0),
        ("0.0", 0), ("7B", 7), (".5KB", 500), (".5e1KB", 5000), ("2.MB", 2 * 10**6), ("1e3KB", 10**6), ("1E-3MB", 1000),
        ("1000PB", 10**18),
    ],
)  # fmt: skip
def test_sizes(text, value):
    assert parse_bytes(text) == value


def test_bandwidths_count_bytes_and_bits():
    assert parse_bandwidth("12GB/s") == 12 * 10**9
    assert parse_bandwidth("10Gbps") == 125 * 10**7
    assert parse_bandwidth("1GiB/s") == 2**30
    assert parse_bandwidth("20bps") == 2  # 2.5 rounds half to even


def test_times():
    assert parse_time("3.2ms") == 3_200_000
    assert parse_time("5us") == 5000
    assert parse_time("1s") == 10**9
    assert parse_time("2.5ns") == 2
    assert parse_time("3.5ns") == 4


@pytest.mark.parametrize(
    ("parse", "text", "sentence"),
    [
        (parse_bytes, "16", "memory: '16' has no unit"),
        (parse_bytes, "16XB", "memory: 'XB' in '16XB' is not a known unit"),
        (parse_bytes, "16gb", "memory: 'gb' in '16gb' is not a known unit"),
        (parse_bytes, "16GB/s", "memory: 'GB/s' in '16GB/s' is not a known unit"),
        (parse_bytes, "-1GB", "memory: '-1GB' is not a non-negative number"),
        (parse_bytes, "nan", "memory: 'nan' is not a non-negative number"),
        (parse_bytes, "infGB", "memory: 'infGB' is not a non-negative number"),
        (parse_bytes, "", "memory: '' is not a non-negative number"),
        (parse_bytes, "1 6GB", "memory: '1 6GB' is not a non-negative number"),
        (parse_bytes, "1_6GB", "memory: '1_6GB' is not a non-negative number"),
        (parse_bytes, "\u0661GB", "memory: '\u0661GB' is not a non-negative number"),
        (parse_bytes, "1001PB", "memory: '1001PB' is too large"),
        (parse_bytes, "1e999GB", "memory: '1e999GB' is too large"),
        (parse_bytes, "9" * 60 + "GB", "memory: '999"),
        (parse_bytes, "9" * 5000 + "GB", "memory: '999"),
        (parse_bytes, "1GB" * 5000, "memory: '1GB1GB"),
        (parse_bytes, "0." + "9" * 5000 + "GB", "memory: '0.999"),
        (parse_bandwidth, "12", "memory: '12' has no unit"),
        (parse_bandwidth, "12GB", "memory: 'GB' in '12GB' is not a known unit"),
        (parse_bandwidth, "0", "memory: '0' must be positive"),
        (parse_bandwidth, "0GB/s", "memory: '0GB/s' must be positive"),
        (parse_bandwidth, "1bps", "memory: '1bps' must be positive"),
        (parse_time, "3", "memory: '3' has no unit"),
        (parse_time, "3min", "memory: 'min' in '3min' is not a known unit"),
    ],
)
def test_what_is_refused_says_where_and_why(parse, text, sentence):
    with pytest.raises(BadInput) as caught:
        parse(text, "memory")
    assert str(caught.value).startswith(sentence)
    assert len(str(caught.value)) < 300


def test_exact_texts_come_back():
    for count in counts():
        assert parse_bytes(exact_bytes(count)) == count
        assert parse_time(exact_time(count)) == count
        if count:
            assert parse_bandwidth(exact_bandwidth(count)) == count


@pytest.mark.parametrize(("parse", "units"), [(parse_bytes, SIZES), (parse_bandwidth, BANDWIDTHS), (parse_time, TIMES)])
def test_parsing_is_exact_arithmetic(parse, units):
    rng, tried = random.Random(0), 0
    for unit, size in units.items():
        for thousandths in (1, 500, 1500, 2500, 999_999, *(rng.randint(1, 999_999) for _ in range(30))):
            number = f"{thousandths // 1000}.{thousandths % 1000:03d}"
            exact = round(Fraction(number) * size)
            if 0 < exact <= LARGEST:
                assert parse(f"{number}{unit}") == exact
                tried += 1
    assert tried > 20 * len(units)


def test_the_printed_size_is_within_its_last_digit():
    for count in counts():
        text = format_bytes(count)
        unit = SIZES[text.split()[1]]
        assert abs(Fraction(text.split()[0]) * unit - count) <= Fraction(unit, 200) + count * Fraction(1, 10**14)


def test_printed_forms():
    assert format_bytes(16 * 10**9) == "16 GB"
    assert format_bytes(10**8) == "0.10 GB"
    assert format_bytes(10**8 - 1) == "100.00 MB"
    assert format_bytes(0) == "0 MB"
    assert format_bytes(40 * 10**9) == "40 GB"
    assert format_bytes(1536 * 10**9) == "1.54 TB"
    assert format_bytes(9999) == "9999 B"
    assert format_bytes(-(10**9)) == "-1 GB"
    assert format_bandwidth(12_500_000_000) == "12.5 GB/s"
    assert format_ns(3_200_000) == "3.200 ms"
    assert exact_bytes(0) == "0B"
    assert exact_bytes(16 * 2**30) == "16GiB"
    assert exact_time(0) == "0ns"


def test_three_devices_or_more_in_a_row_are_written_as_a_range():
    assert [format_devices(x) for x in ((7,), (0, 1), (1, 2, 3), (0, 2, 3))] == ["7", "0,1", "1-3", "0,2,3"]
    assert format_devices((0, 2), ", ") == "0, 2"


def test_milliseconds_come_back():
    for nanoseconds in (x for x in counts() if x <= 10**12):
        assert ms_to_ns(f"{nanoseconds // 10**6}.{nanoseconds % 10**6:06d}") == nanoseconds
        assert ms_to_ns(Fraction(nanoseconds, 10**6)) == nanoseconds


def test_milliseconds_round_half_to_even():
    assert ms_to_ns("0.0000005") == 0
    assert ms_to_ns("0.0000015") == 2
    assert ms_to_ns(0.1) == 100_000  # the decimal that is printed, not the binary fraction
