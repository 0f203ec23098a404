"""Schedules: values at the ends, one text each, and refusal of numbers that mean nothing."""

import itertools
import math

import pytest

from mismatch_sim import schedules
from mismatch_sim.schedules import cosine, linear, onset, table, to_text, warmup_cosine


@pytest.mark.parametrize("make", [linear, cosine])
def test_ramp_reaches_its_ends_and_stays(make):
    schedule = make(0.5, 0.1, 10)
    assert schedule(0) == 0.5
    assert schedule(10) == pytest.approx(0.1, abs=1e-15)
    assert schedule(999) == schedule(10)
    assert all(0.1 <= schedule(t) <= 0.5 for t in range(10))


def test_onset_is_a_step_function():
    assert [onset(0.3, 2)(t) for t in range(4)] == [0.0, 0.0, 0.3, 0.3]
    assert onset(0.3, 0)(0) == 0.3


@pytest.mark.parametrize("schedule", [linear(0, 1, 7), cosine(1, 0, 3), onset(2, 4), onset(2, 0)])
def test_table_is_the_schedule_and_its_last_value_holds(schedule):
    values = table(schedule)
    assert values == [schedule(t) for t in range(len(values))]
    assert schedule(len(values) + 100) == values[-1]


def test_integers_become_floats_so_equal_schedules_are_equal():
    assert linear(0, 1, 5) == linear(0.0, 1.0, 5)
    assert hash(onset(1, 5)) == hash(onset(1.0, 5))
    assert to_text(linear(0, -0.0, 5)) == "linear(start=0.0, end=0.0, steps=5)"


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_text_starts_with_the_name_in_the_table(name):
    assert to_text(schedules.SCHEDULES[name](*([1] * len(_fields(name))))).startswith(name + "(")


def _fields(name):
    return schedules.SCHEDULES[name].__dataclass_fields__


@pytest.mark.parametrize(
    ("make", "args", "message"),
    [
        (linear, (0, 1, 0), "linear: steps must be an integer >= 1, got 0"),
        (cosine, (0, 1, -3), "cosine: steps must be an integer >= 1, got -3"),
        (linear, (0, 1, 2.0), "linear: steps must be an integer >= 1, got 2.0"),
        (linear, (0, 1, True), "linear: steps must be an integer >= 1, got True"),
        (linear, (math.nan, 1, 2), "linear: start must be a finite number, got nan"),
        (cosine, (0, math.inf, 2), "cosine: end must be a finite number, got inf"),
        (onset, ("x", 2), "onset: value must be a finite number, got 'x'"),
        (onset, (1, -1), "onset: begin must be an integer >= 0, got -1"),
    ],
)
def test_bad_numbers_are_refused_by_name(make, args, message):
    with pytest.raises(ValueError) as caught:
        make(*args)
    assert str(caught.value) == message


def test_warmup_cosine_starts_above_zero_and_ends_at_the_floor():
    rates = [warmup_cosine(t, 1e-3, 10, 100, floor=0.1) for t in range(101)]
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) == rates[10] == 1e-3
    assert rates[100] == pytest.approx(1e-4)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
