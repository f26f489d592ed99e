"""Templates look values up in JSON, and do nothing else."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.nodes.parts import template
from penstock.nodes.parts.template import Template, TemplateFailed, TemplateInvalid

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("text", "values", "rendered"),
    [
        ("no places", {}, "no places"),
        ("{{ a }}", {"a": "x"}, "x"),
        ("<{{a}}{{ a }}>", {"a": "x"}, "<xx>"),
        ("{{ a.b[1].c }}", {"a": {"b": [0, {"c": "deep"}]}}, "deep"),
        ('{{ a["any key"] }}', {"a": {"any key": "x"}}, "x"),
        ("{{ a }}", {"a": {"n": [1, None, True]}}, '{"n": [1, null, true]}'),
        ("{{ a }}", {"a": None}, "null"),
        ("{{ a }}", {"a": "ü"}, "ü"),
        (r"\{{ a }} {{ a }}", {"a": "x"}, "{{ a }} x"),
        ("{ {a} }}", {"a": "x"}, "{ {a} }}"),
        ("{{ a-b.c-d }}", {"a-b": {"c-d": 1}}, "1"),
        ("{{ a.items }}", {"a": {"items": "the key, not the method"}}, "the key, not the method"),
    ],
)
def test_values_replace_their_placeholders(text: str, values: dict[str, Any], rendered: str) -> None:
    assert Template(text).render(values) == rendered


@pytest.mark.parametrize(
    "text",
    [
        "{{ a",
        "{{ }}",
        "{{ a() }}",
        "{{ a.b() }}",
        "{{ a + b }}",
        "{{ a | upper }}",
        "{{ a.b[-1] }}",
        "{{ a[b] }}",
        "{{ [0] }}",
        "{{ .a }}",
        "{{ a..b }}",
        "{{ 'a' }}",
        "{{ a.__class__() }}",
        "{% for a in b %}{{ a }}{{ %}",
        "{{ a b }}",
        "{{ {{ a }} }}",
        "{{ ü }}",
        "{{ a" + ".a" * 40 + " }}",
        "{{ a }}" * 1_001,
        "x" * 100_001,
    ],
)
def test_an_invalid_placeholder_is_refused_when_the_template_is_parsed(text: str) -> None:
    with pytest.raises(TemplateInvalid):
        Template(text)


@pytest.mark.parametrize(
    "text",
    ["{{ b }}", "{{ a.__class__ }}", "{{ a.b.__class__ }}", "{{ a.b.c }}", "{{ a.l[2] }}", "{{ a.l.x }}", "{{ a[0] }}"],
)
def test_a_missing_value_is_an_error_that_names_it(text: str) -> None:
    values = {"a": {"b": "text", "l": [1, 2]}}
    with pytest.raises(TemplateFailed, match="has no value"):
        Template(text).render(values)
    assert Template(text).render(values, missing="-") == "-"


def test_attributes_are_never_looked_at() -> None:
    class Trap:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    with pytest.raises(TemplateFailed):
        Template("{{ a.secret }}").render({"a": Trap()})
    with pytest.raises(TemplateFailed, match="is not JSON"):
        Template("{{ a }}").render({"a": object()})


def test_a_value_is_never_read_as_a_template() -> None:
    assert Template("{{ a }}").render({"a": "{{ secret }}", "secret": "x"}) == "{{ secret }}"


def test_the_size_of_the_result_is_checked_before_it_is_rendered() -> None:
    with pytest.raises(TemplateFailed, match="1,000,000 characters"):
        Template("{{ a }}" * 1_000).render({"a": "x" * 1_001})
    endless: list[Any] = ["x" * 1_000] * 500
    with pytest.raises(TemplateFailed, match="1,000,000 characters"):
        Template("{{ a }}").render({"a": [endless] * 1_000_000})
    with pytest.raises(TemplateFailed, match="1,000,000 characters"):
        Template("{{ a }}").render({"a": [endless] * 1_000}, escape=str.upper)


def test_a_value_that_contains_itself_is_an_error() -> None:
    around: list[Any] = []
    around.append(around)
    with pytest.raises(TemplateFailed, match="is not JSON"):
        Template("{{ a }}").render({"a": around})


def test_unclosed_places_take_no_longer_than_their_size() -> None:
    with pytest.raises(TemplateInvalid):
        Template("{{" * (template.MAX_TEMPLATE // 2))


def test_it_says_which_values_it_takes() -> None:
    assert Template("{{ a.b }} {{ c[0] }} {{ a }}").names == {"a", "c"}


@given(st.text(alphabet='{}.[]\\"ab01 ü'))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(TemplateInvalid):
        assert isinstance(Template(text).render({}, missing=""), str)


@given(JSON)
def test_any_json_is_shown(value: Any) -> None:
    assert isinstance(Template("{{ a }}").render({"a": value}), str)
