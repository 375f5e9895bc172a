"""The bulk of an article's markup: links, notes, and templates that show nothing. Regular expressions remove it.

wikitextparser then parses the sections that have other markup: it takes ten times as long.
"""

from __future__ import annotations

import re

from stages.text.templates import has_words, name_of_template, words_of_template

#: Nesting depth of templates that MediaWiki allows ($wgMaxTemplateDepth, once 40).
_PASSES_MAX = 40
#: Characters that wikitextparser does not allow in a title: its own placeholders.
_OWN = r"\x02\x03"
#: An innermost template: without braces inside, and with complete links only.
_TEMPLATE = re.compile(
    rf"\{{\{{(?<!\{{\{{\{{)([^|{{}}\[\]<>\r\n{_OWN}]++)\s*+"
    r"(?:\|([^{}\[\]]*+(?:\[\[[^{}\[\]]*+\]\][^{}\[\]]*+|\[[^{}\[\]]++\][^{}\[\]]*+)*+))?\}\}"
)
#: A link to a page. One with "=" stays: it would name a template's argument; one with "." too: it may be a picture.
_LINK = re.compile(
    rf"\[\[(?<!\[\[\[):?(?:([^\[\]{{}}|<>\r\n:={_OWN}]++)|([^\[\]{{}}|<>\r\n.={_OWN}]++))(?:\|([^\[\]{{}}|<>\n=]*+))?\]\]"
)
#: A link to another site: its label is shown.
_EXTERNAL = re.compile(
    r"\[https?://(?<!\[\[http://)(?<!\[\[https://)[^\s\[\]<>\"{}|]++(?:[ \t]++([^\[\]{}<>|\n]*+))?\]"
)
#: Tags without attributes that show nothing themselves.
_TAG = re.compile(r"</?(?:small|big|su[bp]|[bisuq]|em|tt|var|dfn|kbd|span|div|center)\s*>", re.IGNORECASE)
_TABLE = re.compile(r"^[ \t:]*+\{\|[^{}]*?\n[ \t]*+\|\}(?!\})", re.MULTILINE)
#: Markup that needs the parser.
_OTHER = re.compile(r"\[\[|\{\{|\{\||<[a-z/]|\[(?=[a-z]+:|//)", re.IGNORECASE)
_MARKUP = re.compile(r"[\[\]{}<>&\n]|''")


def without_simple_markup(text: str, no_text: re.Pattern[str]) -> str:
    """Wikitext with simple links and templates replaced by the words that they show, the innermost first.

    `no_text`: links that show nothing.
    """
    text = _TAG.sub("", text)
    for _ in range(_PASSES_MAX):
        before = len(text)
        text = _TEMPLATE.sub(_words, text)
        text = _EXTERNAL.sub(_shown, _LINK.sub(_label, no_text.sub("", text)))
        if len(text) == before:
            break
    return _TABLE.sub("\n", text)


def has_other_markup(text: str) -> bool:
    """Whether what `without_simple_markup` has left is more than text, apostrophes and entities."""
    return _OTHER.search(text) is not None


def _words(match: re.Match[str]) -> str:
    written, arguments = match.groups()
    name = name_of_template(written)
    if not name.strip("_"):
        return match[0]
    if not has_words(name):
        return ""
    if _MARKUP.search(arguments or "") or ":" in name:
        return match[0]
    values = [] if arguments is None else [value.strip() for value in arguments.split("|") if "=" not in value]
    shown = words_of_template(name, values)
    return match[0] if "=" in shown or _MARKUP.search(shown) else shown


def _label(match: re.Match[str]) -> str:
    article, page, label = match.groups()
    return article or page if label is None else label


def _shown(match: re.Match[str]) -> str:
    return match[1] or ""
