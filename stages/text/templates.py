"""The few templates that expand to words inside a sentence, which would be incomplete without them.

These are the ones most frequent inside paragraphs: quantities, foreign words, dashes.
"""

from __future__ import annotations

import re

#: Placeholder for an essential part of a sentence that is not text, such as a formula; the sentence is dropped.
HOLE = "\x03"
#: Placeholder for what can be dropped inside brackets, such as a pronunciation; outside brackets it is a `HOLE`.
ASIDE = "\x04"

_SIGNS = {
    "'s": "'s", "'": "'", "' \"": "'\"", "-\"": "\"", "=": "=", "nbsp": " ", "spaces": " ",
    "ndash": "–", "mdash": "—", "emdash": "—", "mdashb": "—", "dash": "–",
    "snd": " – ", "snds": " – ", "spnd": " – ", "spaced ndash": " – ", "spaced en dash": " – ", "spaced mdash": " — ",
}  # fmt: skip
_FIRST = frozenset(
    ("nowrap", "nobr", "nobold", "noitalic", "small", "big", "large", "smaller", "larger", "sc", "smallcaps", "nihongo")
    + ("linktext", "railgauge", "track gauge", "not a typo", "sic", "proper name", "strong", "em")
    + ("abbr", "abbrlink", "as written", "visible anchor", "vanchor")
)
_BLOCKS = frozenset(("quote", "blockquote", "quotation", "cquote", "bquote"))
_LAST = frozenset(("lang", "transl", "transliteration", "rtl-lang", "script", "unicode"))
_HOLES = re.compile(
    r"(?:val|chem2?|frac|sfrac|music|math|mvar|e|formatnum:.*|inflation|age.*|angbr|vr|gaps|currentyear|inrconvert|us\$|gbp"
    r"|pop density|number|mathcal|tmath|bigmath|overline|sup|sub|su|nuclide|physics particle|subatomic particle|usd)"
)
_QUANTITIES = frozenset(("convert", "cvt"))
_WITH_WORDS = {"as of": "as of", "since": "since", "circa": "c.", "c.": "c.", "uss": "USS", "hms": "HMS"}
_KNOWN = _SIGNS.keys() | _FIRST | _LAST | _BLOCKS | _QUANTITIES | _WITH_WORDS.keys()
_ASIDES = ("ipa", "respell", "lang-", "pron-")
_NUMBER = re.compile(r"[-−+]?[\d.,]+(?:/\d+)?")
_RANGE_WORDS = {
    "-": "–",
    "–": "–",
    "to": "to",
    "and": "and",
    "or": "or",
    "by": "by",
    "x": "by",
    "to(-)": "to",
    "×": "by",
}


def name_of_template(written: str) -> str:
    """The name as `has_words` and `words_of_template` take it: in lower case, with single spaces."""
    return " ".join(written.lower().split())


def has_words(name: str) -> bool:
    """Whether `words_of_template` handles this template; all others expand to nothing."""
    return name in _KNOWN or name.startswith(_ASIDES) or bool(_HOLES.fullmatch(name))


def words_of_template(name: str, values: list[str]) -> str:
    """What a template expands to inside a sentence: words, `HOLE`, `ASIDE`, or ''.

    `name`: from `name_of_template`; `values` are the positional arguments, in order.
    """
    if name in _SIGNS:
        return _SIGNS[name]
    if name in _QUANTITIES:
        return _quantity(values)
    if name in _WITH_WORDS:
        return f"{_WITH_WORDS[name]} {values[0]}" if values else ""
    if name in _FIRST:
        return values[0] if values else ""
    if name in _BLOCKS:
        return f"\n\n{values[0]}\n\n" if values else ""
    if name in _LAST:
        return values[-1] if len(values) > 1 else ""
    return ASIDE if name.startswith(_ASIDES) else HOLE


def _quantity(values: list[str]) -> str:
    """`{{convert|5|to|10|km|mi}}` → "5 to 10 km": everything up to the first unit."""
    words = []
    for value in values:
        words.append(_RANGE_WORDS.get(value, value))
        if not (_NUMBER.fullmatch(value) or value in _RANGE_WORDS):
            return " ".join(words)
    return HOLE
