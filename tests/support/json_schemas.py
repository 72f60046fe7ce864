"""A hundred JSON schemas like those of applications: nested, with references, enums, patterns, formats and Unicode.

Most texts and lists are bounded, so that the output of a small model ends. A few are unbounded on purpose.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 24}
INT: Schema = {"type": "integer", "minimum": 0, "maximum": 999}
BOOL: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def obj(_optional: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """Return the schema of an object with exactly these properties. All except the optional ones are required."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in _optional],
        "additionalProperties": False,
    }


def arr(items: Schema, low: int = 0, high: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def pattern(regex: str) -> Schema:
    return {"type": "string", "pattern": regex}


def number(low: float, high: float, **more: Any) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high, **more}


def integer(low: int, high: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, **more}


def fmt(name: str) -> Schema:
    return {"type": "string", "format": name}


def with_defs(schema: Schema, **defs: Schema) -> Schema:
    return {**schema, "$defs": defs}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


SCALARS = [
    TEXT,
    INT,
    BOOL,
    NULL,
    number(-1, 1),
    integer(-5, 5),
    integer(10, 10),
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 7},
    {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    {"type": "string", "minLength": 5, "maxLength": 8},
    {"const": "only this"},
    {"const": {"a": [1, 2, {"b": None}]}},
    {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
    {"type": ["string", "boolean"], "maxLength": 6},
]

ENUMS = [
    enum("red", "green", "blue"),
    enum(1, 2, 3),
    enum("a", 1, None, True),
    enum("", " ", "  "),
    enum('quote "', "back\\slash", "new\nline", "tab\t"),
    obj(status=enum("open", "closed"), priority=enum("low", "medium", "high")),
    arr(enum("x", "y", "z"), 2, 4),
    obj(mood=enum("😀", "😢", "🤔")),
    obj(level=enum(0.5, 1.5, 2.5)),
    enum([1, 2], {"k": "v"}, "plain"),
]

PATTERNS = [
    pattern("^[A-Z]{3}-[0-9]{4}$"),
    pattern(r"^\d{3}-\d{2}-\d{4}$"),
    pattern("^(cat|dog|bird)s?$"),
    pattern("^[a-z]+(_[a-z]+){1,3}$") | {"maxLength": 30},
    pattern("^#[0-9a-f]{6}$"),
    pattern(r"^v\d+\.\d+\.\d+$") | {"maxLength": 16},
    pattern('^[^"\\\\]{1,10}$'),
    obj(plate=pattern("^[A-Z]{2} [0-9]{2} [A-Z]{3}$")),
    obj(phone=pattern(r"^\+[0-9]{1,3} [0-9]{6,9}$"), name=TEXT),
    arr(pattern("^[a-f0-9]{4}$"), 1, 3),
]

FORMATS = [
    obj(day=fmt("date")),
    obj(at=fmt("time")),
    obj(when=fmt("date-time")),
    obj(id=fmt("uuid")),
    obj(mail=fmt("email")),
    obj(ip=fmt("ipv4")),
]

OBJECTS = [
    obj(name=TEXT, age=integer(0, 150)),
    obj(("nickname",), name=TEXT, nickname=TEXT),
    obj(("a", "b", "c"), a=INT, b=BOOL, c=NULL),
    obj(),
    obj(title=TEXT, year=integer(1900, 2100), rating=number(0, 10)),
    obj(city=TEXT, temperature=number(-50, 50), unit=enum("celsius", "fahrenheit")),
    obj(x=number(0, 1), y=number(0, 1), label=TEXT),
    obj(ok=BOOL, error={"type": ["string", "null"], "maxLength": 20}),
    {
        "type": "object",
        "properties": {"id": INT},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 4,
    },
    {"type": "object", "additionalProperties": integer(0, 9), "maxProperties": 3},
    {"type": "object", "properties": {"kind": {"const": "point"}}, "required": ["kind"]},
    obj(**{"with space": INT, "with-dash": INT, "$dollar": INT, 'quo"te': INT, "": INT}),
    obj(**{f"field_{i}": BOOL for i in range(12)}),
    obj(first=TEXT, last=TEXT, email=pattern("^[a-z]{1,8}@[a-z]{1,8}\\.(com|org)$")),
]

UNICODE = [
    obj(名前=TEXT, 年齢=integer(0, 150)),
    obj(città=enum("Roma", "Forlì", "Nardò"), größe=INT),
    enum("日本語", "한국어", "العربية", "русский", "ελληνικά"),
    obj(emoji=enum("👩‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷"), ok=BOOL),
    pattern("^[а-я]{2,8}$"),
    pattern("^[぀-ゟ]{1,5}$"),
    obj(text=pattern("^[àéîöü]{1,6}$")),
    {"const": "naïve café – “quoted” … ∑ 𝛼"},
    obj(ключ=enum("да", "нет"), 鍵=BOOL),
    arr(enum("é", "e\u0301", "ñ", "\u00a0"), 1, 3),
]

NESTED = [
    obj(person=obj(name=TEXT, address=obj(street=TEXT, zip=pattern("^[0-9]{5}$")))),
    obj(items=arr(obj(sku=pattern("^[A-Z]{2}[0-9]{3}$"), quantity=integer(1, 99)), 1, 2)),
    obj(matrix=arr(arr(integer(0, 9), 2, 2), 2, 2)),
    arr(arr(arr(BOOL, 1, 2), 1, 2), 1, 2),
    obj(a=obj(b=obj(c=obj(d=obj(e=obj(f=BOOL)))))),
    obj(user=obj(name=TEXT, roles=arr(enum("admin", "editor", "viewer"), 1, 2)), active=BOOL),
    obj(order=obj(id=INT, lines=arr(obj(product=TEXT, price=number(0, 1000)), 1, 2)), paid=BOOL),
    {"type": "array", "prefixItems": [TEXT, INT, BOOL], "items": False, "minItems": 3},
    {"type": "array", "prefixItems": [enum("x", "y")], "items": INT, "minItems": 2, "maxItems": 3},
    obj(point={"type": "array", "prefixItems": [number(-90, 90), number(-180, 180)], "items": False, "minItems": 2}),
    obj(questions=arr(obj(text=TEXT, options=arr(TEXT, 2, 2), answer=integer(0, 1)), 1, 1)),
    obj(meta=obj(tags=arr(pattern("^[a-z]{1,8}$"), 0, 3), version=pattern("^[0-9]+\\.[0-9]+$") | {"maxLength": 8})),
]

CHOICES = [
    {"anyOf": [INT, NULL]},
    {"anyOf": [obj(kind={"const": "circle"}, radius=INT), obj(kind={"const": "square"}, side=INT)]},
    arr({"anyOf": [{"type": "string", "maxLength": 6}, INT, BOOL]}, 1, 3),
    obj(value={"anyOf": [TEXT, arr(INT, 0, 2)]}),
    {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 9}]},
    {"allOf": [{"type": "object", "properties": {"a": INT}, "required": ["a"]},
               {"type": "object", "properties": {"b": BOOL}, "required": ["b"]}]},
    obj(result={"anyOf": [obj(ok={"const": True}, value=INT), obj(ok={"const": False}, reason=TEXT)]}),
    {"oneOf": [obj(type={"const": "a"}, a=INT), obj(type={"const": "b"}, b=TEXT)]},
    obj(shape={"oneOf": [{"const": "round"}, {"const": "flat"}]}),
    obj(id={"anyOf": [pattern("^[0-9]{1,6}$"), integer(1, 999_999)]}),
]  # fmt: skip

REFERENCES = [
    with_defs(obj(a=ref("name"), b=ref("name")), name=TEXT),
    with_defs(ref("pair"), pair=obj(left=ref("leaf"), right=ref("leaf")), leaf=integer(0, 9)),
    with_defs(obj(start=ref("point"), end=ref("point")), point=obj(x=INT, y=INT)),
    with_defs(
        ref("tree"),
        tree=obj(("left", "right"), value=integer(0, 9), left=ref("tree"), right=ref("tree")),
    ),
    with_defs(ref("list"), list={"anyOf": [NULL, obj(head=integer(0, 9), tail=ref("list"))]}),
    with_defs(obj(items=arr(ref("item"), 1, 2)), item=obj(name=TEXT, colour=ref("colour")), colour=enum("red", "blue")),
    {"type": "object", "properties": {"x": INT, "y": {"$ref": "#/properties/x"}}, "required": ["x", "y"],
     "additionalProperties": False},
    {"definitions": {"old": enum("style")}, "type": "array", "items": {"$ref": "#/definitions/old"},
     "minItems": 1, "maxItems": 2},
    with_defs(obj(n=ref("a~1b")), **{"a/b": integer(1, 2)}),
    with_defs(obj(a=ref("deep")), deep=obj(b=ref("deeper")), deeper=obj(c=ref("deepest")), deepest=BOOL),
]  # fmt: skip

OPEN = [
    {"type": "object"},
    {"type": "array"},
    {},
    {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}},
]

SCHEMAS: list[Schema] = [
    *SCALARS, *ENUMS, *PATTERNS, *FORMATS, *OBJECTS, *UNICODE, *NESTED, *CHOICES, *REFERENCES, *OPEN,
]  # fmt: skip
