"""The drafts of JSON Schema: which keywords each of them knows, and what is known to have no effect on validity."""

from __future__ import annotations

from dataclasses import dataclass


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DRAFT_4 = _words(
    "type enum multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength pattern format items "
    "additionalItems maxItems minItems uniqueItems maxProperties minProperties required properties patternProperties "
    "additionalProperties dependencies allOf anyOf oneOf not $ref"
)
_DRAFT_6 = _DRAFT_4 | _words("const contains propertyNames")
_DRAFT_7 = _DRAFT_6 | _words("if then else")
_2019 = _DRAFT_7 | _words(
    "$recursiveRef dependentRequired dependentSchemas unevaluatedItems unevaluatedProperties minContains maxContains"
)
_2020 = (_2019 - {"$recursiveRef", "additionalItems"}) | _words("prefixItems $dynamicRef")

ANNOTATIONS = _words(
    "$schema $id id $comment $defs definitions $anchor $dynamicAnchor $recursiveAnchor $vocabulary title description "
    "default examples example deprecated readOnly writeOnly contentMediaType contentEncoding contentSchema discriminator"
)
"""Keywords that never make a value invalid. `discriminator` only tells where to look; the `oneOf` beside it decides."""


@dataclass(frozen=True)
class Dialect:
    """One draft.

    Attributes:
        name: as shown to users.
        keywords: those that can make a value invalid.
        boolean_exclusive: `exclusiveMinimum` is a flag of `minimum`.
        tuple_items: `items` may be a list, followed by `additionalItems`.
        ref_alone: keywords beside `$ref` have no effect.
    """

    name: str
    keywords: frozenset[str]
    boolean_exclusive: bool = False
    tuple_items: bool = True
    ref_alone: bool = False


LATEST = Dialect("2020-12", _2020, tuple_items=False)
_DIALECTS = {
    "json-schema.org/draft-04/schema": Dialect("draft-04", _DRAFT_4, boolean_exclusive=True, ref_alone=True),
    "json-schema.org/draft-06/schema": Dialect("draft-06", _DRAFT_6, ref_alone=True),
    "json-schema.org/draft-07/schema": Dialect("draft-07", _DRAFT_7, ref_alone=True),
    "json-schema.org/draft/2019-09/schema": Dialect("2019-09", _2019),
    "json-schema.org/draft/2020-12/schema": LATEST,
}


def find_dialect(uri: str) -> Dialect | None:
    """The draft that a `$schema` names, or None."""
    return _DIALECTS.get(uri.split("://", 1)[-1].removesuffix("#"))


def known_dialects() -> str:
    """Names of all, for messages."""
    return ", ".join(d.name for d in _DIALECTS.values())
