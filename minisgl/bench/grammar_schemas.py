"""Two hundred schemas of the kinds that people send: tool calls, extraction, nested configuration.

Written in a short notation, one entity a line: `name field:type field?:type ...` (`?` marks an optional field).

    types   str str(1..20) /pattern/ int int(0..9) num num(0..1) bool null date datetime time email uuid uri
            hostname ipv4 ipv6 duration any  a|b (enum)  [type] [type](1..5) {type} (map)  @entity  type! (or null)
"""

# ruff: noqa: E501
from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

ENTITIES = r"""
get_weather location:str(1..60) unit?:celsius|fahrenheit days?:int(1..14)
send_email to:[email](1..5) subject:str(0..120) body:str cc?:[email] priority?:low|normal|high
search_web query:str(1..200) max_results?:int(1..50) safe?:bool language?:/^[a-z]{2}$/
create_event title:str start:datetime end:datetime attendees?:[email] location?:str! remind_minutes?:int(0..1440)
convert_currency amount:num(0..1000000) source:/^[A-Z]{3}$/ target:/^[A-Z]{3}$/
get_stock symbol:/^[A-Z]{1,5}$/ interval?:1m|5m|1h|1d from?:date to?:date
run_query sql:str database:orders|users|events timeout?:int(1..300) dry_run?:bool
translate text:str source_language?:str! target_language:en|de|fr|es|zh|ja formal?:bool
set_alarm time:time label?:str(0..40) repeat?:[mon|tue|wed|thu|fri|sat|sun](0..7)
book_flight origin:/^[A-Z]{3}$/ destination:/^[A-Z]{3}$/ departure:date return_date?:date! passengers:int(1..9) cabin?:economy|business|first
play_music artist?:str track?:str playlist?:str volume:int(0..100) shuffle:bool
create_ticket title:str(3..100) description:str severity:critical|major|minor|trivial labels?:[str(1..20)](0..8) assignee?:uuid!
resize_image url:uri width:int(1..8192) height:int(1..8192) format:png|jpeg|webp quality?:int(1..100)
read_file path:/^[^\0]+$/ encoding?:utf-8|latin-1 offset?:int(0..) length?:int(1..)
post_message channel:/^#[a-z0-9_-]{1,80}$/ text:str(1..4000) thread?:str! mentions?:[str]
http_request method:GET|POST|PUT|PATCH|DELETE url:uri headers?:{str} body?:any timeout?:num(0..60)
schedule_job cron:/^(\S+ ){4}\S+$/ command:str retries?:int(0..10) enabled:bool
get_directions origin:@point destination:@point mode:driving|walking|cycling|transit avoid?:[tolls|ferries|highways]
add_to_cart sku:/^[A-Z]{2}-[0-9]{4,8}$/ quantity:int(1..99) options?:{str}
calculate expression:str(1..500) precision?:int(0..15)
dns_lookup host:hostname record:A|AAAA|MX|TXT|CNAME server?:ipv4
set_thermostat room:living|kitchen|bedroom|office celsius:num(5..30) duration?:duration
point latitude:num(-90..90) longitude:num(-180..180) altitude?:num!
address street:str(1..80) number?:str(1..8) city:str postcode:/^[0-9]{4,6}$/ country:/^[A-Z]{2}$/
person name:str(1..60) age:int(0..150) email?:email! phone?:/^\+?[0-9 ]{5,20}$/ address?:@address
company name:str founded?:int(1600..2100) employees?:int(0..)! website?:uri! headquarters?:@address public:bool
product id:uuid name:str(1..80) price:num(0..) currency:USD|EUR|GBP|JPY in_stock:bool tags:[str(1..24)](0..10)
review author:str rating:int(1..5) title?:str(0..80) text:str date:date helpful?:int(0..)
invoice number:/^INV-[0-9]{6}$/ issued:date due?:date seller:@company buyer:@company lines:[@line](1..20) total:num(0..)
line description:str(1..120) quantity:int(1..) unit_price:num(0..) tax_rate?:num(0..1)
recipe title:str servings:int(1..24) ingredients:[@ingredient](1..30) steps:[str](1..20) vegetarian:bool minutes?:int(1..600)
ingredient name:str amount:num(0..) unit:g|kg|ml|l|piece|tsp|tbsp optional?:bool
sentiment label:positive|neutral|negative score:num(0..1) aspects?:[@aspect]
aspect term:str polarity:positive|neutral|negative confidence?:num(0..1)
entity text:str type:PERSON|ORG|LOC|DATE|MISC start:int(0..) end:int(0..)
relation subject:@entity predicate:works_for|located_in|founded_by|part_of object:@entity
paper title:str authors:[str](1..50) year:int(1900..2100) doi?:/^10\.[0-9]{4,9}\/\S+$/ keywords?:[str(1..40)](0..12) abstract?:str!
resume name:str email:email experience:[@job] education:[@degree] skills:[str(1..40)](0..40) languages?:{basic|fluent|native}
job employer:str title:str from:/^[0-9]{4}-(0[1-9]|1[0-2])$/ to?:/^([0-9]{4}-(0[1-9]|1[0-2])|present)$/ summary?:str
degree school:str subject:str level:bachelor|master|phd|other year?:int(1950..2100)
character name:str house:Gryffindor|Slytherin|Ravenclaw|Hufflepuff blood_status:Pure-blood|Half-blood|Muggle-born occupation:student|teacher|auror alive:bool wand:@wand
wand wood:str core:str length:num(0..20)
movie title:str year:int(1888..2100) director:str genres:[action|comedy|drama|horror|scifi](1..3) rating?:num(0..10) seen:bool
city name:str country:str population:int(0..) area_km2?:num(0..)! mayor?:str!
bug file:str line:int(1..) severity:error|warning|info message:str suggestion?:str!
diff_hunk path:str old_start:int(0..) new_start:int(0..) lines:[/^[ +-]/]
test_result suite:str passed:int(0..) failed:int(0..) skipped?:int(0..) duration_ms:num(0..) failures?:[@failure]
failure test:str message:str trace?:[str](0..50)
patient id:/^P[0-9]{5}$/ age:int(0..130) sex:female|male|other|unknown conditions:[str] medication:[@medication]
medication name:str dose_mg:num(0..) times_per_day:int(1..12) until?:date!
transaction id:uuid at:datetime amount:num(-1000000..1000000) currency:USD|EUR|GBP merchant?:str category:food|travel|rent|other
contract parties:[@company](2..6) effective:date term_months:int(1..600) governing_law?:str clauses:[@clause](0..40)
clause heading:str text:str obligations?:[str]
meeting topic:str date:date participants:[str](2..30) decisions:[str] actions:[@action]
action owner:str task:str due?:date! done:bool
server host:hostname port:int(1..65535) tls?:bool certificates?:[str] limits?:@limits
limits requests_per_second:int(1..100000) burst?:int(1..) max_body_kb:int(1..1048576)
database engine:postgres|mysql|sqlite host?:hostname port?:int(1..65535) name:str(1..63) pool?:@pool
pool min:int(0..100) max:int(1..1000) idle_seconds?:num(0..3600)
logging level:debug|info|warning|error format?:json|text file?:str! rotate?:@rotation
rotation max_mb:int(1..10240) keep:int(0..365)
deployment name:/^[a-z][a-z0-9-]{0,62}$/ image:str replicas:int(0..100) env?:{str} ports?:[int(1..65535)] resources?:@resources
resources cpu:/^[0-9]+m?$/ memory:/^[0-9]+(Mi|Gi)$/ gpu?:int(0..16)
pipeline name:str stages:[@stage](1..12) on:[push|pull_request|schedule](1..3) timeout_minutes?:int(1..360)
stage name:str(1..40) run:[str](1..30) needs?:[str] allow_failure?:bool image?:str!
feature_flag key:/^[a-z_]+$/ enabled:bool rollout:num(0..1) rules?:[@rule]
rule attribute:country|plan|version operator:eq|ne|in|gt value:any
theme name:str primary:/^#[0-9a-f]{6}$/ secondary?:/^#[0-9a-f]{6}$/ dark:bool fonts?:{str} spacing?:[int(0..64)](4..4)
sensor id:int(0..) kind:temperature|humidity|pressure unit:str readings:[@reading](0..100)
reading at:datetime value:num quality?:good|suspect|bad
network cidr:/^[0-9.]{7,15}\/[0-9]{1,2}$/ gateway:ipv4 dns:[ipv4](1..3) ipv6?:ipv6!
quiz question:str options:[str(1..100)](2..6) answer:int(0..5) explanation?:str
plan goal:str steps:[@plan_step](1..10) assumptions?:[str] risk:low|medium|high
plan_step thought:str tool:search|code|ask|finish input?:str! depends_on?:[int(0..20)]
""".strip().splitlines()


def _parse() -> dict[str, list[tuple[str, bool, str]]]:
    found = {}
    for line in ENTITIES:
        name, rest = line.split(" ", 1)
        fields = re.split(r" (?=[a-z_0-9]+\??:)", rest)
        split = (field.split(":", 1) for field in fields)
        found[name] = [(field.rstrip("?"), field.endswith("?"), kind) for field, kind in split]
    return found


_PARSED = _parse()
_PLAIN = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "num": {"type": "number"},
    "bool": {"type": "boolean"},
    "null": {"type": "null"},
    "any": {},
}
_FORMATS = {"datetime": "date-time"} | {
    name: name for name in ("date", "time", "email", "uuid", "uri", "hostname", "ipv4", "ipv6", "duration")
}
_LIMITS = {"str": ("minLength", "maxLength"), "int": ("minimum", "maximum"), "num": ("minimum", "maximum")}


def _type(kind: str, closed: bool) -> dict[str, Any]:
    if kind.endswith("!"):
        return {"anyOf": [_type(kind[:-1], closed), {"type": "null"}]}
    if kind.startswith("/"):
        return {"type": "string", "pattern": kind[1:-1]}
    if kind.startswith("@"):
        return entity(kind[1:], closed)
    if kind.startswith("{"):
        return {"type": "object", "additionalProperties": _type(kind[1:-1], closed)}
    if found := re.fullmatch(r"\[(.*)\](?:\((\d+)\.\.(\d+)\))?", kind):
        schema: dict[str, Any] = {"type": "array", "items": _type(found[1], closed)}
        return schema | ({"minItems": int(found[2]), "maxItems": int(found[3])} if found[2] else {})
    if found := re.fullmatch(r"(str|int|num)\((-?\d+)\.\.(\d*)\)", kind):
        low, high = _LIMITS[found[1]]
        schema = {**_PLAIN[found[1]], low: int(found[2])}
        return schema | ({high: int(found[3])} if found[3] else {})
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if kind in _FORMATS:
        return {"type": "string", "format": _FORMATS[kind]}
    return {"type": "string", "enum": kind.split("|")}


def entity(name: str, closed: bool = True) -> dict[str, Any]:
    """One entity as an object schema; `closed` forbids undeclared names."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {field: _type(kind, closed) for field, _, kind in _PARSED[name]},
        "required": [field for field, optional, _ in _PARSED[name] if not optional],
    }
    return schema | ({"additionalProperties": False} if closed else {})


def _tools(names: list[str]) -> dict[str, Any]:
    """A call of one of several tools, told apart by the name."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": entity(name)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in names
    ]
    return {"oneOf": calls}


@lru_cache(maxsize=1)
def realistic_schemas() -> list[tuple[str, dict[str, Any]]]:
    """(label, schema), 200 of them."""
    names = list(_PARSED)
    found = [(name, entity(name)) for name in names]
    found += [(f"open {name}", entity(name, closed=False)) for name in names[::3]]
    found += [(f"list of {name}", {"type": "array", "items": entity(name), "maxItems": 8}) for name in names[1::2]]
    for start in range(0, 20, 2):
        found.append((f"tools from {names[start]}", _tools(names[start : start + 2 + start // 4])))
    for first, second in zip(names[20:], names[45:]):
        both = {"properties": {"kind": {"enum": [first, second]}, first: entity(first), second: entity(second)}}
        found.append((f"{first} and {second}", {"type": "object", "required": ["kind"], **both}))
    for name in names[::2]:
        ref = {"$ref": "#/$defs/item"}
        properties = {"items": {"type": "array", "items": ref}, "best": {"anyOf": [ref, {"type": "null"}]}}
        found.append((f"refs to {name}", {"$defs": {"item": entity(name)}, "properties": properties, "type": "object"}))
    return found[:200]
