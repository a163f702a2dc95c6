"""Values of options, from Python and from words: right types pass exactly, wrong ones are refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from rlsample.algorithms.option_values import check_value, describe, field_types, parse_text
from rlsample.errors import ConfigError
from rlsample.settings import option


@dataclass(frozen=True)
class Example:
    rate: float = option(0.5, "a number")
    count: int | None = option(None, "maybe a number")
    sizes: tuple[int, ...] = option((64, 64), "widths")


def test_field_types_are_resolved_in_order():
    assert field_types(Example) == {"rate": float, "count": int | None, "sizes": tuple[int, ...]}
    assert list(field_types(Example)) == ["rate", "count", "sizes"]


GOOD = [
    (1, float, 1.0),
    (0.25, float, 0.25),
    (3, int, 3),
    (None, int | None, None),
    (True, bool | float, True),
    (2, bool | float, 2.0),
    ([64, 32], tuple[int, ...], (64, 32)),
    ((), tuple[int, ...], ()),
    ({"a": 1}, Mapping[str, Any], {"a": 1}),
    ("x", str | None, "x"),
    ("auto", Literal["auto", "numpy"], "auto"),
    (object, Any, object),
]


@pytest.mark.parametrize(("value", "hint", "expected"), GOOD)
def test_right_values_are_taken_in_the_fields_form(value, hint, expected):
    got = check_value("name", value, hint)
    assert got == expected
    assert type(got) is type(expected)


BAD = [
    (True, int, "a whole number"),
    (1.5, int, "a whole number"),
    (True, float, "a number"),
    ("3", int, "a whole number"),
    (None, float, "a number"),
    (1, bool, "true or false"),
    ([1, 2.5], tuple[int, ...], "a list of whole numbers"),
    ("64", tuple[int, ...], "a list of whole numbers"),
    (3, Mapping[str, Any], "a mapping"),
    ("numpi", Literal["auto", "numpy"], "'auto' or 'numpy'"),
    ("x", float | None, "a number or none"),
]


@pytest.mark.parametrize(("value", "hint", "wanted"), BAD)
def test_wrong_values_are_refused_with_what_was_wanted(value, hint, wanted):
    with pytest.raises(ConfigError) as caught:
        check_value("gamma", value, hint)
    assert str(caught.value) == f"option 'gamma' must be {wanted}, not {value!r}"
    assert describe(hint) == wanted


WORDS = [
    ("3", int, 3),
    ("1e-3", float, 1e-3),
    ("3", float, 3.0),
    ("none", float | None, None),
    ("None", str | None, None),
    ("runs/a", str | None, "runs/a"),
    ("true", bool, True),
    ("off", bool, False),
    ("true", bool | float, True),
    ("10", bool | float, 10.0),
    ("64,32", tuple[int, ...], (64, 32)),
    ("64", tuple[int, ...], (64,)),
    ("", tuple[int, ...], ()),
    ('{"size": 3}', Mapping[str, Any], {"size": 3}),
    ("numpy", Literal["auto", "numpy"], "numpy"),
    ("CartPole-v1", Any, "CartPole-v1"),
]


@pytest.mark.parametrize(("text", "hint", "expected"), WORDS)
def test_words_of_a_command_line(text, hint, expected):
    got = parse_text("name", text, hint)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("text", "hint"),
    [("3.5", int), ("abc", float), ("maybe", bool), ("6,x", tuple[int, ...]), ("{", Mapping[str, Any]), ("1", bool)],
)
def test_words_that_do_not_fit(text, hint):
    with pytest.raises(ConfigError, match=r"option .name. must be .*, not"):
        parse_text("name", text, hint)
