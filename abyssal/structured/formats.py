"""String formats of JSON Schema as regular expressions in the engine's syntax.

Each matches a subset of what its standard allows, chosen so that strict and lenient validators agree: days that exist, `T`
and `Z` in capitals, no leap seconds, no addresses longer than the standards permit.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StringFormat:
    """Texts that match `pattern` as a whole and are at most `max_length` characters long."""

    pattern: str
    max_length: int | None = None


def _year_day() -> str:
    """A date from 0001-01-01 on, with 29 February in leap years only."""
    year = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
    fourth = r"(?:0[48]|[2468][048]|[13579][26])"
    leap = rf"(?:[0-9]{{2}}{fourth}|{fourth}00)"
    long, short = r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    days = rf"(?:{long}|{short}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    return rf"(?:{year}-{days}|{leap}-02-29)"


def _duration() -> str:
    """An ISO 8601 duration with at least one part, larger units before smaller and none left out between two."""
    number = r"[0-9]{1,9}"
    time = rf"T(?:{number}H(?:{number}M(?:{number}S)?)?|{number}M(?:{number}S)?|{number}S)"
    date = rf"(?:{number}Y(?:{number}M(?:{number}D)?)?|{number}M(?:{number}D)?|{number}D)"
    return rf"P(?:{date}(?:{time})?|{time}|{number}W)"


def _ipv6() -> str:
    """Eight groups of hexadecimal digits, or fewer with one `::`."""
    group = r"[0-9a-fA-F]{1,4}"
    forms = [rf"(?:{group}:){{7}}{group}"]
    for before in range(8):
        head = "" if before == 0 else rf"{group}(?::{group}){{{before - 1}}}"
        tail = "" if before == 7 else rf"(?:{group}(?::{group}){{0,{6 - before}}})?"
        forms.append(f"{head}::{tail}")
    return "|".join(forms)


_DATE = _year_day()
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_ATOM = r"[a-zA-Z0-9!#$%\&'*+/=?\^_`{|}\~\-]+"
_ENCODED = r"%[0-9a-fA-F]{2}"
_PATH_CHAR = rf"(?:[a-zA-Z0-9\-._\~!$\&'()*+,;=:@]|{_ENCODED})"
_USER = rf"(?:(?:[a-zA-Z0-9\-._\~!$\&'()*+,;=:]|{_ENCODED})*@)?"
_AUTHORITY = rf"//{_USER}{_HOSTNAME}(?::[0-9]{{1,5}})?(?:/{_PATH_CHAR}*)*"
_ROOTLESS = rf"{_PATH_CHAR}+(?:/{_PATH_CHAR}*)*"
_TAIL = rf"(?:{_PATH_CHAR}|[/?])*"

FORMATS: dict[str, StringFormat] = {
    "date": StringFormat(_DATE),
    "time": StringFormat(_TIME),
    "date-time": StringFormat(rf"{_DATE}T{_TIME}"),
    "duration": StringFormat(_duration()),
    "email": StringFormat(rf"{_ATOM}(?:\.{_ATOM})*@{_HOSTNAME}", 64),
    "hostname": StringFormat(_HOSTNAME, 253),
    "ipv4": StringFormat(rf"{_OCTET}(?:\.{_OCTET}){{3}}"),
    "ipv6": StringFormat(_ipv6()),
    "uuid": StringFormat(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"),
    "uri": StringFormat(rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:{_AUTHORITY}|{_ROOTLESS})(?:\?{_TAIL})?(?:#{_TAIL})?"),
    "json-pointer": StringFormat(r"(?:/(?:[^/\~\x00-\x1F\x7F]|\~[01])*)*"),
}
