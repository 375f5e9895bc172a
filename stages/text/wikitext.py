"""MediaWiki markup → prose: one paragraph per line, without headings, lists, tables, notes and most templates.

Regular expressions recognize notes, pictures, links and templates without words; wikitextparser parses the sections
that have more markup. A paragraph that still contains anything like markup afterwards is dropped.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from html import unescape

from wikitextparser import ParserFunction, Table, Template, WikiText

from stages.text.simple_markup import has_other_markup, without_simple_markup
from stages.text.templates import ASIDE, HOLE, has_words, name_of_template, words_of_template

#: Minimum characters of a page and of a line worth keeping, and the longest line that is processed.
PAGE_MIN, _LINE_MIN, _LINE_MAX = 200, 30, 20_000
#: Unclosed brackets make the parser quadratic; a section whose unclosed openings × characters exceed this is dropped.
_TANGLE_MAX = 10_000_000
#: So do deeply nested ones; MediaWiki allows 40 templates ($wgMaxTemplateDepth).
_DEPTH_MAX = 100

#: Sections at the end of an article that hold no prose.
_BACK_MATTER = frozenset(
    (
        *("references", "notes", "footnotes", "citations", "sources", "bibliography", "works cited", "further reading"),
        *("see also", "external links", "notes and references", "references and notes", "primary sources"),
        *("secondary sources", "literature", "general references", "references and further reading", "discography"),
        *("filmography", "gallery", "selected bibliography", "select bibliography", "publications", "selected works"),
    )
)
_HEADING = re.compile(r"^=[^\n]{1,300}=[ \t]*$", re.MULTILINE)
#: Elements removed with their content: notes, pictures, code; and formulas, which leave a `HOLE` in their sentence.
_WITHOUT_TEXT = re.compile(
    r"<(ref|references|gallery|source|syntaxhighlight|pre|timeline|score|graph|imagemap|inputbox|categorytree|templatedata"
    r"|section|style|script|math|chem|ce|hiero)\b[^<>]*?(?:/>|>.*?</\1\s*>)",
    re.DOTALL | re.IGNORECASE,
)
_FORMULAS = frozenset(("math", "chem", "ce", "hiero"))
#: A link to the same page in another language; MediaWiki shows it in the margin, not in the text.
_LANGUAGE_LINK = r"(?:[a-z]{2,3}|simple)(?:-[a-z]+)*:[^\[\]|\n]*"
_LIST = ("*", "#", ":", ";")
_REPLACED = [
    (
        re.compile(r"</?ref\b", re.IGNORECASE),
        "|",
    ),  # an unclosed or unopened note; "|" gets its paragraph dropped as residue
    (re.compile(r"<br\b[^<>]{0,50}>", re.IGNORECASE), " "),
    (re.compile(r"</?(?:blockquote|p|div|center|poem)\b[^<>]{0,200}>", re.IGNORECASE), "\n\n"),
    (re.compile(r"^-{4,}", re.MULTILINE), "\n\n"),
    (re.compile(r"<li\b[^<>]{0,50}>", re.IGNORECASE), "\n*"),
]

_QUOTES, _POSSESSIVE = re.compile("'{2,}"), re.compile(r"(?<=\w)'''(?!')")
_LOOSE = re.compile(
    r"__(?-i:[A-Z]+)__|https?://[^\s<>\[\]|]+|</?(?:[a-z]{1,3}|blockquote|center|div|span|small|big|font)\b[^<>]{0,99}>",
    re.IGNORECASE,
)
_MAY_BE_LOOSE = re.compile(r"<|://|__")
_RESIDUE = re.compile(r"\[\[|\]\]|\{\{|\}\}|\||<(?:/?[a-zA-Z]+[^<>]{0,200}>|ref|/)|&(?:[a-zA-Z]+;|#)|https?:")
_ATTRIBUTE = re.compile(r"\b(?:style|align|colspan|class)\s*=")
_SENTENCE_END = re.compile(r"[.!?…。！？؟।۔][\"'”’»)\]]*$")
#: A lead-in to a dropped list at the end of a paragraph: "… are as follows:".
_LEAD_IN = re.compile(r"(?:^|(?<=[.!?…][\"'”’) ]))[^.!?…]*:$")
_BRACKETED = re.compile(r"\([^()]*\)")
#: What dropped templates leave in brackets and between commas: "( ; 1809-1882)", "born , in", "word .".
_REPAIRS = [
    (re.compile(r"([(\[])[\s,;:–-]+(?=\w|\")"), r"\1"),
    (re.compile(r"[\s,;:]+([)\]])"), r"\1"),
    (re.compile(r"\(\s*(?:or|and|also)?\s*\)|\[\s*\]|\"\s*\"|“\s*”"), ""),
    (re.compile(r"\s+([,.;:!?])(?=\s|$)"), r"\1"),
    (re.compile(r"([,;:])(?:\s*[,;:])+"), r"\1"),
    (re.compile(r"[,;:]\."), "."),
    (re.compile(r"\s{2,}"), " "),
]
#: Whether any of them applies.
_TO_REPAIR = re.compile(r"[(\[][\s,;:–)\]-]|[)\],.;:!?](?<=[\s,;:].)|\((?:or|and|also)\)|\"\s?\"|“\s?”|\s\s", re.DOTALL)
_BRACKETS = re.compile(
    r"\{\{|\}\}|\[\[|\]\]|^[ \t:]*\{\||^[ \t]*\|\}(?!\})|<(?!/|br|hr|li|p\b|d[dt]|t[dhr])(?=[a-z])|</|/>|\[(?=\w+:)",
    re.MULTILINE | re.IGNORECASE,
)
_OPENED_BY = {"}}": "{{", "]]": "[[", "|}": "{|"}


def prose(text: str, media: tuple[str, ...], dropped: Counter[str]) -> str:
    """The paragraphs of a wikitext page, one per line; '' if fewer than `PAGE_MIN` characters are left.

    `media`: names of the namespaces whose links show no text, such as File and Category. `dropped` counts what is
    dropped, by reason.
    """
    first, *others = text.split("<!--")
    # As in MediaWiki, comments are removed first, and an unclosed one runs to the end of the page.
    text = first + "".join(other.partition("-->")[2] for other in others)
    no_text = _links_without_text(media)
    lines = [line for section in _sections(text, dropped) for line in _lines(section, no_text, dropped)]
    if sum(map(len, lines)) < PAGE_MIN:
        dropped["pages: too short"] += 1
        return ""
    return "\n".join(lines)


@functools.cache
def _links_without_text(media: tuple[str, ...]) -> re.Pattern[str]:
    """Links to categories, languages, and pictures with no link in the caption (the parser handles the others)."""
    names = "|".join(map(re.escape, media))
    return re.compile(rf"\[\[\s*(?i:{names})\s*:[^\[\]]*\]\]|\[\[{_LANGUAGE_LINK}\]\]")


def _sections(text: str, dropped: Counter[str]) -> list[str]:
    """The text between headings, without the back matter."""
    found, start, skipped = [], 0, 7
    for match in [*_HEADING.finditer(text), None]:
        if skipped == 7:
            found.append(text[start : match.start() if match else len(text)])
        if match is None:
            break
        heading, start = match[0].strip(), match.end()
        level = min(len(heading) - len(heading.lstrip("=")), len(heading) - len(heading.rstrip("=")), 6)
        if level <= skipped:
            skipped = 7
            if heading.strip("=' \t").lower() in _BACK_MATTER:
                dropped["sections: references, links and the like"] += 1
                skipped = level
    return found


def _lines(section: str, no_text: re.Pattern[str], dropped: Counter[str]) -> Iterator[str]:
    if _is_tangled(section):
        dropped["sections: brackets that never close"] += 1
        return
    section = _WITHOUT_TEXT.sub(lambda match: HOLE if match[1].lower() in _FORMULAS else "", section)
    for tag, text in _REPLACED:
        section = tag.sub(text, section)
    section = without_simple_markup(section, no_text)
    for paragraph in _paragraphs(
        _parsed(section, keep_quotes=True) if has_other_markup(section) else unescape(section)
    ):
        reason, line = _clean(paragraph)
        if reason:
            dropped[reason] += 1
        elif line:
            yield line


def _parsed(text: str, *, keep_quotes: bool = False) -> str:
    """`keep_quotes`: keep the apostrophes that mark bold and italic."""
    found: str = WikiText(text.replace("[[:", "[[")).plain_text(
        replace_templates=_words,
        replace_parser_functions=_words_of_function,
        replace_tables=_nothing,
        replace_bolds_and_italics=not keep_quotes,
    )
    return found


def _is_tangled(text: str) -> bool:
    openings = sum(map(text.count, ("{{", "{|", "[", "<")))
    if openings <= min(_DEPTH_MAX, _TANGLE_MAX // max(len(text), 1)):
        return False
    opened: list[str] = []
    loose = tags = 0
    most = _TANGLE_MAX // max(len(text), 1)
    for match in _BRACKETS.finditer(text):
        mark = match[0].strip(" \t:")
        if mark == "<":
            tags += 1
        elif mark in ("</", "/>"):
            tags = max(tags - 1, 0)
        elif mark not in _OPENED_BY:
            opened.append(mark)
        elif _OPENED_BY[mark] in opened:
            while opened.pop() != _OPENED_BY[mark]:
                loose += 1
        if len(opened) + loose + tags > most or len(opened) > _DEPTH_MAX:
            return True
    return False


def _words(template: Template) -> str:
    name = name_of_template(template.name)
    if not has_words(name):
        return ""
    values = [_parsed(argument.value).strip() for argument in template.arguments if argument.positional]
    return words_of_template(name, values)


def _words_of_function(function: ParserFunction) -> str:
    name = name_of_template(function.name)
    if name == "formatnum":
        return _parsed(function.arguments[0].value).strip()
    return words_of_template(name, []) if has_words(name) else ""


def _nothing(_: Table) -> str:
    return "\n"


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs as in MediaWiki: adjacent lines are joined; list items and indented lines stay separate."""
    gathered: list[str] = []
    for line in text.split("\n"):
        alone = line.startswith((" ", "\t", *_LIST))
        if gathered and (alone or not line or line.isspace()):
            yield " ".join(gathered)
            gathered = []
        if alone:
            yield line
        elif line:
            gathered.append(line)
    yield " ".join(gathered)


def _clean(line: str) -> tuple[str, str]:
    """Clean a paragraph; returns (reason it is dropped or '', text)."""
    if line.startswith(_LIST):
        return "paragraphs: list items", ""
    if len(line) > _LINE_MAX:
        return "paragraphs: too long", ""
    line = " ".join(_without_quotes(_LOOSE.sub("", line) if _MAY_BE_LOOSE.search(line) else line).split())
    if not line:
        return "", ""
    line = _without_holes(line)
    if not line:
        return "paragraphs: nothing but formulas", ""
    line = _repaired(line)
    if _RESIDUE.search(line) or ("=" in line and _ATTRIBUTE.search(line)):
        return "paragraphs: markup left", ""
    if line.endswith(":"):
        line = _LEAD_IN.sub("", line).rstrip()
    if len(line) < _LINE_MIN or not _SENTENCE_END.search(line):
        return "paragraphs: no sentence", ""
    return "", line


def _repaired(line: str) -> str:
    if _TO_REPAIR.search(line):
        for pattern, repaired in _REPAIRS:
            line = pattern.sub(repaired, line)
    return line.strip(" ,;")


def _without_quotes(line: str) -> str:
    """Remove the apostrophes that mark bold and italic.

    If both kinds are odd in number, as in "the ''Eagle'''s pilot", one run of three closes an italic and leaves an
    apostrophe, as in MediaWiki's doQuotes.
    """
    if "''" not in line:
        return line
    runs = [len(run) for run in _QUOTES.findall(line)]
    if runs.count(3) % 2 and runs.count(2) % 2:
        line = _POSSESSIVE.sub("'", line, count=1)
    return _QUOTES.sub("", line)


def _without_holes(line: str) -> str:
    """Drop sentences with a missing formula, and asides in brackets."""
    from sentencex import segment

    if HOLE not in line and ASIDE not in line:
        return line
    line = _BRACKETED.sub(lambda match: match[0].replace(ASIDE, ""), line).replace(ASIDE, HOLE)
    if HOLE not in line:
        return line
    return "".join(sentence for sentence in segment("en", line) if HOLE not in sentence).strip()
