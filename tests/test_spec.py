"""Operators as data: one text per stack, exact round trips, and messages a user can act on."""

import itertools
import json
import math

import numpy as np
import pytest

from mismatch_sim.perturb import spec
from mismatch_sim.perturb.spec import (
    FakeQuant,
    Identity,
    LogitNoise,
    Masked,
    Stack,
    Stale,
    WeightNoise,
    from_json,
    max_staleness,
    parse,
)
from mismatch_sim.schedules import cosine, linear, onset

STRENGTHS = [0.0, 1e-7, 0.1, 3, linear(0, 0.01, 100), cosine(0.3, 0.0, 7), onset(1e-3, 5)]
OPERATORS = [
    Stale(0),
    Stale(4),
    FakeQuant(),
    *(WeightNoise(s) for s in STRENGTHS),
    *(LogitNoise(s) for s in STRENGTHS),
    WeightNoise(0.1, relative=False, resample="never"),
    WeightNoise(0.1, resample="version", include=r"layers\.\d+\.", exclude='norm|it\'s "x"'),
    Masked(WeightNoise(linear(0, 0.01, 100)), "mlp"),
    Masked(Masked(FakeQuant("int8"), "mlp"), exclude=r"^a\b$"),
]
STACKS = [Stack()]
STACKS += [Stack((op,)) for op in OPERATORS]
STACKS += [Stack(pair) for pair in itertools.product(OPERATORS[1::3], OPERATORS[::2])]
STACKS += [Stack(tuple(OPERATORS))]


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_text_and_json_round_trip_exactly(stack):
    text = str(stack)
    again = from_json(json.loads(json.dumps(parse(text).to_json())))
    assert again == parse(text) == stack
    assert hash(again) == hash(stack)
    assert str(again) == text
    assert from_json(json.dumps(stack.to_json())) == stack


def test_all_stacks_have_texts_of_their_own():
    assert len({str(stack) for stack in STACKS}) == len(set(STACKS))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("identity()", "identity()"),
        ("identity()|identity()", "identity()"),
        (" stale( 4 ) |identity( )", "stale(k=4)"),
        ("fake_quant()", "fake_quant(scheme='int8')"),
        ("weight_noise(1, True, 'rollout')", "weight_noise(sigma=1.0)"),
        ("weight_noise(-0.0)", "weight_noise(sigma=0.0)"),
        ("weight_noise(+1e-3)", "weight_noise(sigma=0.001)"),
        ("(stale(1)|stale(2))|stale(3)", "stale(k=1)|stale(k=2)|stale(k=3)"),
        (
            "masked(weight_noise(onset(1, begin=2)), 'mlp')",
            "masked(op=weight_noise(sigma=onset(value=1.0, begin=2)), include='mlp')",
        ),
        (r"masked(stale(1), 'layers\.0')", r"masked(op=stale(k=1), include='layers\\.0')"),
        (r"masked(stale(1), r'\bmlp')", r"masked(op=stale(k=1), include='\\bmlp')"),
    ],
)
def test_text_has_one_canonical_form(text, canonical):
    assert str(parse(text)) == canonical
    assert str(parse(canonical)) == canonical


def test_order_is_kept():
    assert parse("stale(1)|fake_quant()") != parse("fake_quant()|stale(1)")


def test_integers_and_numpy_numbers_become_plain_ones():
    assert WeightNoise(1) == WeightNoise(np.float32(1.0))
    assert str(Stale(np.int64(3))) == "stale(k=3)"
    assert type(WeightNoise(1).sigma) is float


def test_stacks_splice_and_drop_identity():
    inner = Stack((Identity(), Stale(1)))
    assert Stack((inner, Identity(), Stale(2))).ops == (Stale(1), Stale(2))


def test_inert_operators_stay_as_written():
    assert str(parse("stale(0)|weight_noise(0)")) == "stale(k=0)|weight_noise(sigma=0.0)"


@pytest.mark.parametrize(
    ("text", "lag"),
    [("identity()", 0), ("stale(4)|stale(2)", 6), ("masked(masked(stale(3), 'a'), 'b')", 3)],
)
def test_max_staleness_adds_up_along_a_stack(text, lag):
    assert max_staleness(parse(text)) == lag


BAD_TEXT = [
    ("stael(4)", "unknown name 'stael'; allowed: identity, stale, fake_quant,"),
    ("stael(4)", "did you mean 'stale'?"),
    ("weight_noise(sgima=1)", "weight_noise has no argument 'sgima'; allowed: sigma, relative,"),
    ("weight_noise(sgima=1)", "did you mean 'sigma'?"),
    ("stale(-1)", "stale: k must be an integer >= 0, got -1"),
    ("stale(1.0)", "stale: k must be an integer >= 0, got 1.0"),
    ("stale(True)", "stale: k must be an integer >= 0, got True"),
    ("stale('1')", "stale: k must be an integer >= 0, got '1'"),
    ("stale(stale(1))", "stale: k must be an integer >= 0, got"),
    ("stale()", "stale needs k"),
    ("stale(1, 2)", "stale got 2 arguments; allowed: k"),
    ("identity(1)", "identity got 1 arguments; allowed: none"),
    ("stale(1, k=2)", "stale got k twice"),
    ("stale(k=1, k=2)", "k"),
    ("weight_noise(-0.1)", "weight_noise: sigma must be a finite number >= 0, got -0.1"),
    ("weight_noise(1e999)", "weight_noise: sigma must be a finite number >= 0, got inf"),
    ("weight_noise(1" + "0" * 400 + ")", "weight_noise: sigma must be a finite number >= 0"),
    ("weight_noise(True)", "weight_noise: sigma must be a finite number >= 0, got True"),
    ("weight_noise(stale(1))", "weight_noise: sigma must be a finite number >= 0"),
    ("weight_noise(linear(0, -1, 5))", "sigma: linear: end must be a finite number >= 0, got -1.0"),
    ("weight_noise(linear(0, 1, 0))", "linear: steps must be an integer >= 1, got 0"),
    ("weight_noise(nan)", "cannot read 'nan' as a value"),
    ("weight_noise(1, 1)", "weight_noise: relative must be True or False, got 1"),
    ("weight_noise(1, resample='nevr')", "must be one of rollout, version, never, got 'nevr'"),
    ("weight_noise(1, include='(')", "weight_noise: include must be a regular expression, got '('"),
    ("weight_noise(1, include=3)", "weight_noise: include must be a regular expression in quotes"),
    ("masked(stale(1), '\\bmlp')", "masked: include holds a control character"),
    ("logit_noise(-1)", "logit_noise: sigma must be a finite number >= 0, got -1"),
    ("fake_quant('int9')", "fake_quant: scheme must be one of int8, got 'int9'"),
    ("fake_quant(int8)", "(quote a string)"),
    ("masked('mlp')", "masked: op must be one operator, got 'mlp'"),
    ("masked(logit_noise(1), 'mlp')", "masked: op must touch weights, got logit_noise(sigma=1.0)"),
    ("masked(identity(), 'mlp')", "masked: op must touch weights"),
    ("masked(stale(1)|stale(2), 'mlp')", "cannot read 'stale(1)|stale(2)' as a value"),
    ("linear(0, 1, 5)", "must be operators (identity,"),
    ("stale", "stale needs its parentheses"),
    ("stale(4", "cannot read 'stale(4': '(' was never closed"),
    ("stale(4)||stale(1)", "cannot read 'stale(4)||stale(1)'"),
    ("stale(4)\n|\tstale(1)", "cannot read"),
    ("stale(4)+stale(1)", "cannot read 'stale(4)+stale(1)'; allowed: identity,"),
    ("stale(2+2)", "cannot read '2+2' as a value"),
    ("stale(*[1])", "cannot read 'stale(*[1])'"),
    ("stale(**{'k': 1})", "cannot read"),
    ("stale(None)", "cannot read 'None' as a value"),
    ("__import__('os').system('true')", "cannot read"),
    ("os.stale(1)", "cannot read 'os.stale(1)'"),
    ("4", "cannot read '4'"),
    ("", "cannot read ''"),
    ("stale(4)\0", "cannot read"),
    ("stale(" * 5000, "cannot read"),
    ("-" * 20000 + "4", "cannot read"),
]


@pytest.mark.parametrize(("text", "expected"), BAD_TEXT, ids=lambda v: v[:30])
def test_bad_text_is_one_line_that_names_the_setting(text, expected):
    with pytest.raises(ValueError) as caught:
        parse(text, "--perturb")
    message = str(caught.value)
    assert message.startswith("--perturb: ")
    assert expected in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([{"name": "stael"}], "unknown name 'stael'"),
        ([{"name": "stale", "k": 1, "kk": 2}], "stale has no argument 'kk'; allowed: k"),
        ([{"k": 1}], 'must be an object with a "name"'),
        ([["stale", 1]], 'must be an object with a "name"'),
        ([{"name": 3}], 'must be an object with a "name"'),
        ([{"name": "stale", "k": None}], "stale: k must be an integer >= 0, got None"),
        ({"name": "stale", "k": 1}, "must be text or a list of operators"),
        (4, "must be text or a list of operators"),
        ("[{", "perturb: "),
    ],
)
def test_bad_json_is_one_line_that_names_the_setting(data, expected):
    with pytest.raises(ValueError) as caught:
        from_json(data)
    message = str(caught.value)
    assert message.startswith("perturb: ")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, None, "x", [1], 1j])
@pytest.mark.parametrize("make", [WeightNoise, LogitNoise])
def test_strengths_are_finite_and_not_negative(make, value):
    with pytest.raises(ValueError, match=rf"{make.name}: sigma must be a finite number >= 0"):
        make(value)


def test_stack_refuses_what_is_no_operator():
    with pytest.raises(ValueError, match="must be operators"):
        Stack(("stale(1)",))


def test_operator_table_is_complete():
    assert {op.__name__ for op in spec.Operator.__subclasses__()} == {
        op.__name__ for op in spec.OPERATORS.values()
    }


@pytest.mark.parametrize(
    "text",
    [
        "identity()",
        "stale(2)",
        "fake_quant()|logit_noise(0.1)",
        "masked(weight_noise(linear(0, 1, 5), False, 'never', 'a', 'b'), 'mlp')|stale(1)",
    ],
)
def test_build_makes_the_operators(text):
    from mismatch_sim.perturb.base import members_of

    members = [member for member, _ in members_of(parse(text).build())]
    assert [m.name for m in members] == [getattr(o, "op", o).name for o in parse(text).ops]
