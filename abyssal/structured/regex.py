"""Regular expressions as JSON Schema and users write them, rewritten so that every reader agrees on them.

ECMA-262 (which JSON Schema names), Python and the engine read some constructs differently: `\\d`, `\\w`, `\\s` and their
complements beyond ASCII, `.` at line separators, `&&` or `[` inside a class. The rewritten expression spells out the
characters on which all of them agree, so that what it matches is a match for each. What cannot be enforced is refused:
look-around, back-references, word boundaries, anchors in the middle, flags, and repetitions that multiply into too many
positions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_POSITIONS = 20_000
"""Characters a match may be counted through: `(a{1,100}){1,100}` has 10,000."""
MAX_DEPTH = 64
_UNBOUNDED = None

_CATEGORIES = re.compile(r"\{(?:L[ulmto]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?)\}")
_COUNTS = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
_GROUP_NAME = re.compile(r"\?(?:P?<[A-Za-z_][A-Za-z0-9_]*>|:)")

# Characters of each class on which ECMA-262 and Python agree (narrow), and on which at least one says yes (wide).
_NARROW = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\x0B\x0C\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}",
}
_WIDE = {
    "d": r"\p{Nd}",
    "w": r"\p{L}\p{M}\p{N}\p{Pc}\x{200C}\x{200D}",
    "s": _NARROW["s"] + r"\x1C-\x1F\x{85}\x{FEFF}",
}
_NO_LINE_END = r"[^\n\r\x{2028}\x{2029}]"
_ANYTHING = "(?s:.*)"
_EVERYTHING = (r"\s\S]", r"\S\s]", r"\d\D]", r"\D\d]", r"\w\W]", r"\W\w]")
_NAMED_ESCAPES = {"t": 9, "n": 10, "r": 13, "f": 12, "v": 11}
_WHY = {
    "=": "look-ahead is not supported",
    "!": "look-ahead is not supported",
    "<=": "look-behind is not supported",
    "<!": "look-behind is not supported",
    ">": "atomic groups are not supported",
}
_ESCAPE_WHY = {
    "b": "word boundaries are not supported",
    "B": "word boundaries are not supported",
    "A": r"\A means different things to different readers; write ^",
    "Z": r"\Z means different things to different readers; write $",
    "z": r"\z means different things to different readers; write $",
    "k": "back-references are not supported",
}


class RegexError(ValueError):
    """Why a regular expression cannot be enforced, with the position in it."""


@dataclass(frozen=True)
class _Piece:
    """Rewritten text, the positions it is counted through, and which ends of it are anchors.

    Attributes:
        begins: it starts with `^`, so nothing may stand before it.
        ends: it ends with `$`, so nothing may stand behind it.
    """

    text: str
    positions: int
    begins: bool = False
    ends: bool = False


@dataclass(frozen=True)
class Rewritten:
    """An expression that matches only what every reader would match.

    Attributes:
        text: in the engine's syntax.
        is_exact: all readers agree; otherwise some would match more.
    """

    text: str
    is_exact: bool


def rewrite(pattern: str, *, anchors: bool = True, searched: bool = False, json_text: bool = True) -> Rewritten:
    """Rewrite an expression in the engine's syntax.

    Args:
        pattern: as the user wrote it.
        anchors: keep `^` and `$` (the engine searches for the pattern); False where the whole text has to match anyway.
        searched: the result has to match a whole text in which the pattern occurs; it holds no anchors.
        json_text: the text stands in a JSON string, where control characters without a short escape cannot be written.

    Raises:
        RegexError: saying what is not supported and where.
    """
    parser = _Parser(pattern, anchors=anchors and not searched, searched=searched, json_text=json_text)
    piece = parser.alternatives(0)
    if parser.position < len(pattern):
        raise parser.error("unbalanced ')'")
    if piece.positions > MAX_POSITIONS:
        raise RegexError(f"repetitions multiply to {piece.positions} positions; the limit is {MAX_POSITIONS}")
    return Rewritten(piece.text, parser.is_exact)


def literal(text: str) -> str:
    """An expression that matches exactly `text`."""
    return "".join(_spell(ord(c)) for c in text)


def is_writable(text: str) -> bool:
    """Whether a JSON string can hold `text` with the escapes that the engine writes (the short ones)."""
    return not any(_is_unwritable(ord(c)) for c in text)


def _is_unwritable(code: int) -> bool:
    return (code < 0x20 and code not in (8, 9, 10, 12, 13)) or code == 0x7F


def _spell(code: int) -> str:
    """One character, escaped so that it means itself inside and outside of a class."""
    if code < 0x21 or 0x7F <= code <= 0xA0 or code in (0x2028, 0x2029, 0xFEFF):
        return f"\\x{{{code:X}}}"
    char = chr(code)
    return (
        char if char.isalnum() or code > 0x7F or char in "<>" else "\\" + char
    )  # a backslash would make them word boundaries


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str, *, anchors: bool, searched: bool, json_text: bool) -> None:
        self._pattern = pattern
        self._anchors = anchors
        self._searched = searched
        self._json_text = json_text
        self.position = 0
        self.is_exact = True

    def error(self, reason: str) -> RegexError:
        return RegexError(f"{reason} (at character {self.position})")

    def _peek(self, text: str) -> bool:
        return self._pattern.startswith(text, self.position)

    def _next(self) -> str:
        if self.position >= len(self._pattern):
            raise self.error("the pattern ends too early")
        char = self._pattern[self.position]
        self.position += 1
        return char

    def alternatives(self, depth: int) -> _Piece:
        if depth > MAX_DEPTH:
            raise self.error(f"groups are nested more than {MAX_DEPTH} deep")
        options = [self._sequence(depth)]
        while self._peek("|"):
            self.position += 1
            options.append(self._sequence(depth))
        return _Piece(
            "|".join(self._padded(o) if depth == 0 else o.text for o in options),
            sum(o.positions for o in options),
            any(o.begins for o in options),
            any(o.ends for o in options),
        )

    def _padded(self, option: _Piece) -> str:
        """An alternative with what may stand around it."""
        if not self._searched:
            return option.text
        return f"{'' if option.begins else _ANYTHING}{option.text}{'' if option.ends else _ANYTHING}"

    def _sequence(self, depth: int) -> _Piece:
        pieces: list[_Piece] = []
        while self.position < len(self._pattern) and not self._peek("|") and not self._peek(")"):
            piece = self._repeated(self._atom(depth))
            if pieces and (piece.begins or pieces[-1].ends):
                raise self.error("^ and $ are supported at the ends of an alternative only")
            pieces.append(piece)
        return _Piece(
            "".join(p.text for p in pieces),
            sum(p.positions for p in pieces),
            bool(pieces) and pieces[0].begins,
            bool(pieces) and pieces[-1].ends,
        )

    def _atom(self, depth: int) -> _Piece:
        char = self._next()
        if char == "^":
            return _Piece("^" if self._anchors else "", 0, begins=True)
        if char == "$":
            return _Piece("$" if self._anchors else "", 0, ends=True)
        if char == "(":
            return self._group(depth)
        if char == "[":
            return _Piece(self._character_class(), 1)
        if char == ".":
            self.is_exact = False
            return _Piece(_NO_LINE_END, 1)
        if char == "\\":
            return _Piece(self._escape(), 1)
        if char in "*+?{":
            self.position -= 1
            raise self.error(f"{char} has nothing to repeat; write \\{char} for the character")
        return _Piece(self._literal(ord(char)), 1)

    def _group(self, depth: int) -> _Piece:
        if self._peek("?"):
            match = _GROUP_NAME.match(self._pattern, self.position)
            if match is None:
                mark = next((m for m in ("<=", "<!", "=", "!", ">") if self._pattern.startswith(m, self.position + 1)), "")
                raise self.error(_WHY.get(mark, "flags and other extensions of groups are not supported"))
            self.position = match.end()
        inner = self.alternatives(depth + 1)
        if self.position >= len(self._pattern):
            raise self.error("a group is not closed")
        if self._searched and (inner.begins or inner.ends):
            raise self.error("^ and $ inside a group are not supported here")
        self.position += 1
        return _Piece(f"(?:{inner.text})", inner.positions, inner.begins, inner.ends)

    def _repeated(self, atom: _Piece) -> _Piece:
        start = self.position
        counts = self._counts()
        if counts is None:
            return atom
        if atom.begins or atom.ends:
            self.position = start
            raise self.error("^ and $ cannot be repeated")
        if self._peek("+"):
            raise self.error("possessive repetition is not supported")
        if self._peek("?"):
            self.position += 1  # lazy: the same texts match
        if self._counts() is not None:
            raise self.error("a repetition cannot be repeated; group it")
        low, high = counts
        if high is not _UNBOUNDED and low > high:
            self.position = start
            raise self.error(f"the repetition {{{low},{high}}} is empty")
        times = f"{{{low},{'' if high is _UNBOUNDED else high}}}"
        return _Piece(f"(?:{atom.text}){times}", atom.positions * max(low + 1 if high is _UNBOUNDED else high, 1))

    def _counts(self) -> tuple[int, int | None] | None:
        """Read `*`, `+`, `?` or `{m,n}`, if one is next."""
        for sign, counts in (("*", (0, _UNBOUNDED)), ("+", (1, _UNBOUNDED)), ("?", (0, 1))):
            if self._peek(sign):
                self.position += 1
                return counts
        if not self._peek("{"):
            return None
        match = _COUNTS.match(self._pattern, self.position)
        if match is None:
            raise self.error("{ does not start a repetition; write \\{ for the character")
        self.position = match.end()
        low = int(match[1])
        return low, low if match[2] is None else int(match[3]) if match[3] else _UNBOUNDED

    def _literal(self, code: int) -> str:
        if 0xD800 <= code <= 0xDFFF:
            raise self.error("half of a surrogate pair is no character")
        if self._json_text and _is_unwritable(code):
            raise self.error(f"the control character U+{code:04X} cannot be written in a JSON string here")
        return _spell(code)

    def _escape(self) -> str:
        """What follows a backslash outside of a class."""
        char = self._next()
        self.is_exact = self.is_exact and char not in "dwsDWSpP"
        if char in "dws":
            return f"[{_NARROW[char]}]"
        if char in "DWS":
            return f"[^{_WIDE[char.lower()]}]"
        if char in "pP":
            return f"\\{char}{self._category()}"
        return self._literal(self._escaped_code(char))

    def _category(self) -> str:
        match = _CATEGORIES.match(self._pattern, self.position)
        if match is None:
            raise self.error("only general categories such as \\p{L} or \\p{Lu} are supported")
        self.position = match.end()
        return match[0]

    def _escaped_code(self, char: str) -> int:
        """The character that an escape stands for."""
        if char in _NAMED_ESCAPES:
            return _NAMED_ESCAPES[char]
        if char == "0" and not self._pattern[self.position : self.position + 1].isdigit():
            return 0
        if char.isdigit():
            raise self.error("back-references and octal escapes are not supported")
        if char == "x":
            return self._hex(2)
        if char == "u":
            return self._unicode()
        if char == "c":
            letter = self._next()
            if not (letter.isascii() and letter.isalpha()):
                raise self.error("\\c needs a letter")
            return ord(letter) % 32
        if char.isalnum():
            raise self.error(_ESCAPE_WHY.get(char, f"the escape \\{char} is not supported"))
        return ord(char)

    def _hex(self, digits: int) -> int:
        text = self._pattern[self.position : self.position + digits]
        if not re.fullmatch(f"[0-9a-fA-F]{{{digits}}}", text):
            raise self.error(f"expected {digits} hexadecimal digits")
        self.position += digits
        return int(text, 16)

    def _unicode(self) -> int:
        braced = re.compile(r"\{([0-9a-fA-F]{1,6})\}").match(self._pattern, self.position)
        if braced:
            self.position = braced.end()
            code = int(braced[1], 16)
            if code > 0x10FFFF:
                raise self.error("no such character")
            return code
        code = self._hex(4)
        if 0xD800 <= code < 0xDC00 and self._peek("\\u"):
            self.position += 2
            low = self._hex(4)
            if not 0xDC00 <= low < 0xE000:
                raise self.error("half of a surrogate pair is no character")
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        return code

    def _character_class(self) -> str:
        """A class, from behind its opening bracket."""
        if self._pattern[self.position : self.position + 5] in _EVERYTHING:
            self.position += 5
            return r"[\x{0}-\x{10FFFF}]"
        negated = self._peek("^")
        if negated:
            self.position += 1
        if self._peek("]"):
            raise self.error("[] and [^] are read differently by different readers; write \\] for the character")
        parts: list[str] = []
        writable = negated
        while not self._peek("]"):
            part, some_writable = self._class_item(wide=negated)
            parts.append(part)
            writable = writable or some_writable
        self.position += 1
        if self._json_text and not writable:
            raise self.error("the class holds only control characters, which cannot be written in a JSON string here")
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _class_item(self, *, wide: bool) -> tuple[str, bool]:
        """One item of a class, rewritten, and whether a JSON string can hold some character of it.

        In a negated class the widest reading of an item has to be taken, so that what remains is the narrowest.
        """
        first = self._class_end(wide=wide)
        if isinstance(first, str):
            return first, True
        if not self._peek("-") or self._pattern[self.position + 1 : self.position + 2] == "]":
            return _spell(first), not _is_unwritable(first)
        self.position += 1
        last = self._class_end(wide=wide)
        if isinstance(last, str):
            raise self.error("a range cannot end in a class escape; write \\- for the character")
        if last < first:
            raise self.error("the range is reversed")
        writable = (last >= 0x20 and first != 0x7F) or any(first <= c <= last for c in (8, 9, 10, 12, 13))
        if first < 0xD800 and last > 0xDFFF:
            return f"{_spell(first)}-\\x{{D7FF}}\\x{{E000}}-{_spell(last)}", writable
        return f"{_spell(first)}-{_spell(last)}", writable

    def _class_end(self, *, wide: bool) -> int | str:
        """A character of a class, or a class escape rewritten."""
        char = self._next()
        if char != "\\":
            if 0xD800 <= ord(char) <= 0xDFFF:
                raise self.error("half of a surrogate pair is no character")
            return ord(char)
        char = self._next()
        self.is_exact = self.is_exact and char not in "dwsDWSpP"
        if char in "dws":
            return (_WIDE if wide else _NARROW)[char]
        if char in "DWS":
            return f"[^{(_NARROW if wide else _WIDE)[char.lower()]}]"
        if char in "pP":
            return f"\\{char}{self._category()}"
        if char == "b":
            return 8
        code = self._escaped_code(char)
        if 0xD800 <= code <= 0xDFFF:
            raise self.error("half of a surrogate pair is no character")
        return code
