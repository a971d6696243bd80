"""Formats: what is written is accepted by the standard library's own parsers; standard examples are accepted."""

import datetime
import ipaddress
import json
import uuid

import pytest

from abyssal.structured.formats import FORMATS

GOOD = {
    "date": ["2024-02-29", "2000-02-29", "0004-02-29", "1999-12-31", "2023-02-28"],
    "time": ["00:00:00Z", "23:59:59.123456+23:59", "12:30:00-05:00"],
    "date-time": ["1985-04-12T23:20:50.52Z", "1996-12-19T16:39:57-08:00"],
    "duration": ["P1Y2M3DT4H5M6S", "PT1S", "P3W", "P1D", "PT36H", "P1DT12H"],
    "email": ["joe.bloggs@example.com", "te~st@example.com", "a+b@x.co", "user@localhost"],
    "hostname": ["example.com", "a", "xn--4gbwdl.xn--wgbh1c", "a" * 63 + ".b", "1host"],
    "ipv4": ["192.168.0.1", "0.0.0.0", "255.255.255.255"],
    "ipv6": ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "fe80::1:2", "1:2:3::7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8"],
    "uuid": ["2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2EB8AA08-AA98-11EA-B4AA-73B441D16380"],
    "uri": [
        "http://foo.bar/?baz=qux#quux",
        "mailto:John.Doe@example.com",
        "urn:oasis:names",
        "https://u:p@h:80/a%20b",
        "a:b",
    ],
    "json-pointer": ["", "/foo/bar~0/baz~1", "/", "//"],
}
BAD = {
    "date": ["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31", "2024-13-01", "2024-1-1", "20240101"],
    "time": ["12:00:00", "24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00Z", "12:00:00z"],
    "date-time": ["2023-02-29T12:00:00Z", "2024-02-29 12:00:00Z", "2024-02-29", "2024-02-29T12:00:00"],
    "duration": ["P", "PT", "P1S", "P1W2D", "PT1D", "P1YT", "1D", "P2D1Y", "P1Y2D"],
    "email": ["a@", "@b", ".a@b", "a..b@c", "a@b-", "a b@c", "a@b@c"],
    "hostname": ["-a", "a-", "a" * 64, ".a", "a..b", "", "a_b", ".".join(["a" * 60] * 5)],
    "ipv4": ["1.2.3", "256.1.1.1", "01.2.3.4", "1.2.3.4.5", "1.2.3.4/8"],
    "ipv6": ["1:2:3:4:5:6:7", ":::", "1::2::3", "12345::", "::1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::8", ":1"],
    "uuid": ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8-aa08-aa98-11ea-b4aa73b44-1d16380", "g" * 36],
    "uri": ["//a", "a b:c", "http://a b", "\\\\WINDOWS\\share", "abc", "http://[x]", "1a:b"],
    "json-pointer": ["a", "/~2", "/foo/~", "#/a"],
}


@pytest.mark.parametrize("name", FORMATS)
def test_examples(kit, name: str) -> None:
    schema = {"type": "string", "format": name}
    assert [t for t in GOOD[name] if not kit.accepts(json.dumps(t), json=schema)] == []
    assert [t for t in BAD[name] if not kit.rejects(json.dumps(t), json=schema)] == []


PARSERS = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
}


@pytest.mark.parametrize("name", PARSERS)
def test_what_a_random_model_writes_is_parsed_by_the_standard_library(kit, corpus, name: str) -> None:
    template = kit.matcher(json={"type": "string", "format": name})
    texts = set()
    for seed in range(60):
        outcome, written = corpus.write(template.fork(), corpus.RandomModel(kit.vocabulary, seed))
        assert outcome == "done"
        texts.add(json.loads(kit.text(written)))
    for text in texts:
        PARSERS[name](text)
    assert len(texts) > 30


def test_leap_days_are_exactly_those_of_the_calendar(kit) -> None:
    template = kit.matcher(json={"type": "string", "format": "date"})
    for year in (*range(1, 30), *range(1580, 1620), *range(1880, 2040), 9996, 9999):
        matcher = template.fork()
        ids = kit.byte_ids(f'"{year:04d}-02-29"')
        accepted = all(matcher.accept(i) for i in ids)
        assert accepted == (year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)), year
