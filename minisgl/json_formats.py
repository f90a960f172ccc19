"""JSON Schema's string formats as regular expressions over the characters that they may hold.

    date, time, date-time     RFC 3339 (years from 0001, real days, no leap seconds)
    duration                  RFC 3339 appendix A (ISO 8601 durations)
    uuid                      RFC 4122, either case
    email                     RFC 5321 dot-atom at a host name
    hostname                  RFC 1123, labels of 1 to 63, 253 in all
    ipv4, ipv6                RFC 2673 section 3.2, RFC 4291 section 2.2
    uri                       RFC 3986, absolute
    json-pointer              RFC 6901

All but json-pointer are ASCII without quotes and backslashes, so they are written without escapes. Then a length is
a number of bytes, and a limit (`within`) is one more counter on every state, where meeting the format with
`.{0,254}` would search for a way out after every byte.
"""

from __future__ import annotations

from .expressions import Algebra, Alt, Arms, Concat, Literal, Node, Repeat, Switch

_YEARS = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEARS}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"  # at most 127 labels: LONGEST sees to that
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = r"[0-9A-Fa-f]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = (
    rf"(?:(?:{_H16}:){{6}}{_LS32}|::(?:{_H16}:){{5}}{_LS32}|(?:{_H16})?::(?:{_H16}:){{4}}{_LS32}"
    rf"|(?:(?:{_H16}:){{0,1}}{_H16})?::(?:{_H16}:){{3}}{_LS32}"
    rf"|(?:(?:{_H16}:){{0,2}}{_H16})?::(?:{_H16}:){{2}}{_LS32}"
    rf"|(?:(?:{_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}"
    rf"|(?:(?:{_H16}:){{0,4}}{_H16})?::{_LS32}"
    rf"|(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}|(?:(?:{_H16}:){{0,6}}{_H16})?::)"
)
_PCHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_REGISTERED = r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*"
_USER = r"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*@)?"
_AUTHORITY = rf"{_USER}(?:{_REGISTERED}|\[{_IPV6}\])(?::[0-9]{{0,5}})?"
_HIER = rf"(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_PCHAR}+(?:/{_PCHAR}*)*)?"
_QUERY = rf"(?:{_PCHAR}|[/?])*"
_N = r"[0-9]{1,9}"
_CLOCK = rf"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": rf"P(?:(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)(?:{_CLOCK})?|{_CLOCK}|{_N}W)",
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOST})",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:{_HIER}(?:\?{_QUERY})?(?:#{_QUERY})?",
    "json-pointer": r"(?:/(?:[^~/]|~[01])*)*",
}
# what a format further demands of the whole text's length
LONGEST = {"hostname": 253, "email": 254}
ESCAPED = frozenset(("json-pointer",))  # formats with characters that JSON escapes
UNSUPPORTED_FORMATS = frozenset(
    (
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "regex",
        "relative-json-pointer",
        "uri-reference",
        "uri-template",
    )
)


class Within(Node):
    """The words of `body` of at most `high` bytes."""

    __slots__ = ("body", "high")

    def __init__(self, body: Node, high: int):
        super().__init__(body.nullable, body.text)
        self.body, self.high = body, high

    def derive(self, algebra: Algebra) -> Arms:
        arms = ((bits, within(algebra, left, self.high - 1)) for bits, left in algebra.arms(self.body))
        return tuple(arm for arm in arms if arm[1] is not algebra.EMPTY)


def within(algebra: Algebra, body: Node, high: int) -> Node:
    """The words of a regular language (no intersections) of at most `high` bytes; EMPTY when there is none."""
    if body is algebra.EMPTY or _shortest(algebra, body) > high:
        return algebra.EMPTY
    if body is algebra.EPSILON:
        return body
    return algebra.intern(("within", body, high), lambda: Within(body, high))


def _shortest(algebra: Algebra, node: Node) -> int:
    """How many bytes the shortest word has."""
    if node.nullable:
        return 0
    if isinstance(node, Literal):
        return len(node.data)
    known = algebra.shortest.get(node)
    if known is None:
        if isinstance(node, Concat):
            known = _shortest(algebra, node.head) + _shortest(algebra, node.tail)
        elif isinstance(node, Repeat):
            known = node.low * _shortest(algebra, node.body)
        elif isinstance(node, Alt):
            known = min(_shortest(algebra, option) for option in node.options)
        elif isinstance(node, Switch):
            known = 1 + min(_shortest(algebra, after) for _, after in node.arms)
        else:
            raise TypeError(f"no length for {type(node).__name__}")
        algebra.shortest[node] = known
    return known
