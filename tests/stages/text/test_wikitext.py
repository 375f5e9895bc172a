"""Wikitext → prose: what goes, what stays, and that no page can take forever."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from stages.text import wikitext
from stages.text.wikitext import PAGE_MIN, prose

MEDIA = ("category", "datei", "file", "image")
FILLER = "A sentence that makes the page long enough to be kept, and says nothing. " * 4


def text_of(wikitext: str) -> str:
    """What becomes of `wikitext` at the beginning of a page that is long enough."""
    text = prose(f"{wikitext}\n\n{FILLER}", MEDIA, Counter())
    assert text.endswith(FILLER.strip())
    return text.removesuffix(FILLER.strip()).rstrip("\n")


KEPT = [
    (
        "'''Bold''' and ''italic'' words are [[plain]] here.",
        "Bold and italic words are plain here.",
    ),
    (
        "The [[house|houses]] and [[:Category:Barns]] of [[wikt:yard|the yard]] stay.",
        "The houses and Category:Barns of the yard stay.",
    ),
    (
        "See [http://example.org the page], [http://example.org] and http://example.org now and then.",
        "See the page, and now and then.",
    ),
    (
        "A little note<ref>Smith, 1999.</ref> goes,<ref name=a /> as does <!-- this --> comment.",
        "A little note goes, as does comment.",
    ),
    (
        "It cost &pound;5&nbsp;&ndash;&#160;&#x36; and <b>no</b> more<br />than that.",
        "It cost £5 – 6 and no more than that.",
    ),
    (
        "It flows for {{convert|1300|mi|km}} or {{convert|5|to|10|km|mi}} from here.",
        "It flows for 1300 mi or 5 to 10 km from here.",
    ),
    (
        "The word {{lang|grc|ἀναρχία}} is {{nowrap|very old}}{{citation needed|date=May}} indeed.",
        "The word ἀναρχία is very old indeed.",
    ),
    (
        "Jan ({{IPAc-en|j|a|n}}; {{lang-cs|Jan}}; 1809 – 1882) was a man of letters.",
        "Jan (1809 – 1882) was a man of letters.",
    ),
    (
        "It is {{nowrap|{{convert|5|km|mi}} long}} and {{small|{{lang|fr|''grand''}}}}{{efn|{{lang|fr|oui}}}} indeed.",
        "It is 5 km long and grand indeed.",
    ),
    (
        "They had {{formatnum:{{nowrap|5}}}} cows. They had {{formatnum:{{val|5}}}} goats. It is {{CURRENTYEAR}}. It "
        "ends. Here.",
        "They had 5 cows. It ends. Here.",
    ),
    (
        "Jan ({{IPA|jan}}) lived there ( ) for {{formatnum:3003}} days {{!}}.",
        "Jan lived there for 3003 days.",
    ),
    (
        "The ''Eagle'''s pilot and his '''''best''''' friend saw the moon.",
        "The Eagle's pilot and his best friend saw the moon.",
    ),
    (
        "One line of a paragraph\nand the next line of it.",
        "One line of a paragraph and the next line of it.",
    ),
    (
        "[[File:A.jpg|thumb|A [[caption]] of it.]]\nText beside a picture of it, and more of it.",
        "Text beside a picture of it, and more of it.",
    ),
    (
        "{{Infobox\n| name = {{nowrap|X}}\n| x = [[y]]\n}}\nText below a box of facts, and more of it.",
        "Text below a box of facts, and more of it.",
    ),
    (
        '{| class="wikitable"\n|-\n! A !! B\n|-\n| 1 || 2\n|}\nText below a table of facts, and more of it.',
        "Text below a table of facts, and more of it.",
    ),
    (
        "Text with <math>\\frac{{a}}{b}</math> in it. The next sentence is whole again.",
        "The next sentence is whole again.",
    ),
    (
        "__NOTOC__\n== Heading ==\nText below a heading and an __init__, and more of it.\n----",
        "Text below a heading and an __init__, and more of it.",
    ),
    (
        "Some are mentioned here, and more of it. The most important are:\n* one\n# two\n; three\n: four",
        "Some are mentioned here, and more of it.",
    ),
    (
        "Line before a quote, and more of it.<blockquote>The quote is a line, as was to be seen.</blockquote>",
        "Line before a quote, and more of it.\nThe quote is a line, as was to be seen.",
    ),
    (
        "[[fr:Titre]] [[Category:Things|*]] [[Datei:Karte]]\nText above the margin's links.",
        "Text above the margin's links.",
    ),
]


@pytest.mark.parametrize(("wikitext", "expected"), KEPT)
def test_what_a_reader_sees_stays(wikitext: str, expected: str) -> None:
    assert text_of(wikitext) == expected


def test_back_matter_goes_with_its_subsections() -> None:
    page = f"== Life ==\n{FILLER}\n== References ==\nSmith. {FILLER}\n=== Notes ===\n{FILLER}\n== Legacy ==\n{FILLER}"
    counts: Counter[str] = Counter()
    assert prose(page, MEDIA, counts) == "\n".join([FILLER.strip()] * 2)
    assert counts == {"sections: references, links and the like": 1}


@pytest.mark.parametrize("broken", ["{{never closed", "[[never closed", "or <ref>never closed", "| style=a |", "}} ]]"])
def test_a_paragraph_with_markup_left_is_dropped_and_counted(broken: str) -> None:
    counts: Counter[str] = Counter()
    assert (
        prose(f"{FILLER}\n\nA paragraph {broken} in it.\n\n{FILLER}", MEDIA, counts)
        == f"{FILLER.strip()}\n{FILLER.strip()}"
    )
    assert counts["paragraphs: markup left"] == 1


def test_short_pages_are_dropped() -> None:
    sentence = "A sentence of a town on the river Elbe. "
    counts: Counter[str] = Counter()
    assert prose(sentence * 2, MEDIA, counts) == ""
    assert counts == {"pages: too short": 1}
    assert len(prose(sentence * (PAGE_MIN // len(sentence) + 1), MEDIA, counts)) >= PAGE_MIN


NAMES = (
    *(
        "nowrap",
        "lang|fr",
        "convert|5|km",
        "Infobox",
        "cite web",
        "IPA",
        "val|3",
        "small",
        "quote",
        "ndash",
        "as of|2010",
    ),
    *("formatnum:33", "lc:AB", "#if: a", "e", "nbsp", "=", "!", "circa", "Small\n", "CURRENTYEAR", " lang |la", "_"),
)


def some_markup(draw: random.Random, depth: int = 0, *, link: bool = True, block: bool = True) -> str:
    """Nested markup, all of it closed. Pictures contain no external links, whose last bracket the parser takes for the
    picture's; and there are no addresses with "=", which inside a template would name an argument."""

    def inside(*, link: bool = link, block: bool = False) -> str:
        return "".join(some_markup(draw, depth + 1, link=link, block=block) for _ in range(draw.randint(1, 3)))

    ways = [
        lambda: draw.choice(("word ", "two words. ", "a = b ", "&nbsp;x ", "''it'' ", f"{{{{{draw.choice(NAMES)}}}}}"))
    ] * 3
    if depth < 4:
        ways += [
            lambda: f"{{{{{draw.choice(NAMES)}|{inside()}}}}}",
            lambda: f"<small>{inside()}</small>",
            lambda: f'<span class="a">{inside()}</span>',
        ]
        if link:
            ways += [
                lambda: draw.choice(("[[Page]]", "[[:Category:Page]]", "[[A: B.C]]")),
                lambda: f"[[{draw.choice(('Page', 'wikt:page', 'A: B.C', ':fr:Page'))}|{inside(link=False)}]]",
                lambda: f"[[File:A.jpg|thumb|{inside(link=False)}[[Page]]{inside(link=False)}]]",
                lambda: f"[http://a.b/c {inside(link=False)}]",
            ]
        if block:
            ways += [
                lambda: f"{{{{Infobox\n| a = {inside(block=True)}\n| b = {inside()}\n}}}}",
                lambda: f'\n{{| class="a"\n| {inside(block=True)}\n|}}\n',
            ]
    return draw.choice(ways)()


def test_simple_markup_is_what_the_parser_takes_it_for(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    pages = [f"It {''.join(some_markup(draw) for _ in range(4))} ends.\n\n{FILLER}" for _ in range(1500)]
    found = [prose(page, MEDIA, Counter()) for page in pages]
    by_the_parser_alone(monkeypatch)
    for page, text in zip(pages, found, strict=True):
        assert text == prose(page, MEDIA, Counter()), page
    assert len(set(found)) > 400


def by_the_parser_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wikitext, "without_simple_markup", lambda text, no_text: no_text.sub("", text))
    monkeypatch.setattr(wikitext, "has_other_markup", lambda text: True)


PIECES = (
    *(
        "{{",
        "{{a|",
        "[[",
        "[[a|",
        "<b>",
        "<ref ",
        "\n{|",
        "\n|-\n|",
        "[http://a ",
        "''",
        "'''",
        "\n==",
        "= ",
        "{{{",
        "<!--",
    ),
    *("\n* ", "\n;", "<nowiki>", "<math>", '<a b="', "<", "</b>", "{{a|[[b|<i>''", "{{a|[[b|}}]]", ",", "(", "<b {{"),
    *("{{a|b}}", "[[a]]", "[[a|b]]", "{{nowrap|{{", "{{a|[[", "\n{|\n|}", "[[File:a|", "[http://a b]"),
    *("}}", "]]", "|}", "</ref>", "-->", "text. ", "&amp;", "<br>", "/>", "|", "\n\n", "'", ": ", "\x04("),
)


@pytest.mark.timeout(120)  # it takes 3 s at most; if time grew with the square of the length, it would be hours
@pytest.mark.parametrize("piece", PIECES, ids=repr)
def test_a_page_of_one_thing_repeated_comes_to_an_end(piece: str) -> None:
    """Two megabytes, the most that MediaWiki accepts, of what is opened and never closed; some parsers take days."""
    prose(piece * (2_000_000 // len(piece)), MEDIA, Counter())


@pytest.mark.timeout(120)  # it takes 3 s at most
@pytest.mark.parametrize("opening", ["{{nowrap|", "{{Infobox|", "[[a|", "{{{a|", "\n{|\n|", "[http://a "])
def test_a_page_of_one_thing_within_itself_comes_to_an_end(opening: str) -> None:
    closing = {"{{{": "}}}", "{{": "}}", "[[": "]]", "\n{": "\n|}", "[": "]"}
    end = next(end for start, end in closing.items() if opening.startswith(start))
    for depth in (90, 1000, 2_000_000 // len(opening + end)):
        prose(opening * depth + "word" + end * depth, MEDIA, Counter())


def test_random_markup_comes_to_an_end_and_leaves_none() -> None:
    draw = random.Random(5)
    for _ in range(300):
        kinds = draw.sample(PIECES, draw.randint(1, 6))
        page = FILLER + "".join(draw.choices([*kinds, "Some text of a page. "], k=draw.choice((30, 300, 3000))))
        text = prose(page, MEDIA, Counter())
        assert not any(mark in text for mark in ("[[", "]]", "{{", "}}", "{|", "|}", "<ref", "</", "''"))
