"""Streaming XML reader for MediaWiki dumps (pages-articles.xml); `stages.text.wikitext` extracts the text."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn
from xml.parsers import expat

from common.errors import UserError
from stages.text.base import FileSource

#: MediaWiki's own limit ($wgMaxArticleSize, 2048 KiB).
_PAGE_CHARACTERS_MAX = 2 << 20
#: Namespaces whose links show no text: Media, File, Category.
_MEDIA = ("-2", "6", "14")
_MEDIA_NAMES = ("media", "file", "image", "category")
#: Elements whose text is kept, by parent element.
_WANTED = {
    "page": ("title", "ns"),
    "revision": ("model", "text"),
    "namespaces": ("namespace",),
}


@dataclass(frozen=True, slots=True)
class WikiPage:
    """An article in wikitext."""

    title: str
    wikitext: str
    #: Names of the namespaces whose links show no text.
    media: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.wikitext)

    def text(self, dropped: Counter[str]) -> str:
        from stages.text.wikitext import prose

        try:
            return prose(self.wikitext, self.media, dropped)
        except Exception as error:  # one unparsable page of millions must not end the run, but is reported
            print(f"note: the page {self.title!r} cannot be parsed and is left out ({error!r})", file=sys.stderr)
            dropped["pages: not to be parsed"] += 1
            return ""


class WikipediaSource(FileSource):
    """A dump of a wiki's current pages; each article is a document."""

    kind = "mediawiki"
    text_share = 0.15  # English Wikipedia: about 14 GB of 95 GB

    def identity(self) -> str:
        return f"{self.kind} 2:{self.file.sha256}"  # 2: a template inside a template shows its words

    def documents(self, dropped: Counter[str]) -> Iterator[WikiPage]:
        pages, before = _Pages(self.name), dropped.copy()
        try:
            for block in self.blocks():
                pages.feed(block)
                self.language = pages.language
                yield from self._articles(pages, dropped)
            pages.feed(b"")
        except UserError as error:
            if not pages.last:
                raise
            raise UserError(f"{error} (before that, {_so_far(pages, dropped - before)})") from error
        except expat.ExpatError as error:
            yield from self._articles(pages, dropped)  # those complete before the error
            self._refuse(pages, error, dropped - before)

    def _articles(self, pages: _Pages, dropped: Counter[str]) -> Iterator[WikiPage]:
        for page in pages.take():
            dropped["read pages"] += 1
            if page.redirect or page.text[:9].upper() == "#REDIRECT":
                dropped["pages: redirects"] += 1
            elif page.namespace != "0":
                dropped["pages: other namespaces"] += 1
            elif page.model not in ("", "wikitext"):
                dropped["pages: not in wikitext"] += 1
            elif len(page.text) > _PAGE_CHARACTERS_MAX:
                dropped["pages: too long"] += 1
            elif not page.text:
                dropped["pages: empty"] += 1
            else:
                yield WikiPage(page.title, page.text, pages.media)

    def _refuse(self, pages: _Pages, error: expat.ExpatError, counted: Counter[str]) -> NoReturn:
        if not pages.is_dump:
            raise UserError(
                f"{self.name} is not a MediaWiki dump ({error}); give one such as enwiki-latest-pages-articles.xml.bz2"
            ) from None
        raise UserError(
            f"{self.name} is cut or damaged: its XML ends or breaks at byte {pages.offset:,} ({error}); "
            f"{_so_far(pages, counted)}; fetch it again and compare its checksum"
        ) from None


def _so_far(pages: _Pages, counted: Counter[str]) -> str:
    articles = counted["read pages"] - sum(n for reason, n in counted.items() if reason.startswith("pages: "))
    last = f", the last of them {pages.last!r}" if pages.last else ""
    return f"{counted['read pages']:,} pages were read, {articles:,} of them articles{last}"


@dataclass(slots=True)
class _Page:
    title: str = ""
    namespace: str = ""
    model: str = ""
    text: str = ""
    redirect: bool = False


class _Pages:
    """Incremental parser from a dump's bytes to pages; keeps only the page being read in memory."""

    def __init__(self, name: str) -> None:
        self.is_dump = False
        self.language = ""
        #: Title of the last complete page.
        self.last = ""
        self.media: tuple[str, ...] = _MEDIA_NAMES
        self._name = name
        self._prefixes: dict[str, str] = {}  # title prefixes, by namespace
        self._open: list[str] = []
        self._page = _Page()
        self._key = ""
        self._pieces: list[str] | None = None
        self._characters = 0
        self._done: list[_Page] = []
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.buffer_size = 1 << 16
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._characters_of
        self._parser.StartDoctypeDeclHandler = self._doctype

    @property
    def offset(self) -> int:
        """Byte offset of the last error in the XML."""
        return self._parser.ErrorByteIndex

    def feed(self, block: bytes) -> None:
        """Parse one more block; an empty block marks the end. Raises `ExpatError`, `UserError`."""
        self._parser.Parse(block, not block)

    def take(self) -> list[_Page]:
        """The pages completed since the last call."""
        done, self._done = self._done, []
        return done

    def _doctype(self, *_: object) -> NoReturn:
        # Dumps have none; one could only serve an entity-expansion attack.
        raise UserError(
            f"{self._name} has a document type declaration, which MediaWiki dumps do not have; fetch another"
        )

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        parent = self._open[-1] if self._open else ""
        if not self._open:
            if name != "mediawiki":
                raise UserError(
                    f"{self._name} is not a MediaWiki dump: it begins with <{name}>; give pages-articles.xml"
                )
            self.is_dump = True
            self.language = attributes.get("xml:lang", "")
        self._open.append(name)
        if name == "page":
            self._page = _Page()
        elif name == "redirect" and parent == "page":
            self._page.redirect = True
        elif name in _WANTED.get(parent, ()):
            self._pieces, self._characters = [], 0
            self._key = attributes.get("key", "")

    def _characters_of(self, data: str) -> None:
        if self._pieces is not None and self._characters <= _PAGE_CHARACTERS_MAX:
            self._pieces.append(data)
            self._characters += len(data)

    def _end(self, name: str) -> None:
        self._open.pop()
        if name == "page":
            self._finish()
        if self._pieces is None:
            return
        text, self._pieces = "".join(self._pieces), None
        if name == "namespace":
            self._prefixes[self._key] = text
            names = (*_MEDIA_NAMES, *(self._prefixes[key].lower() for key in _MEDIA if self._prefixes.get(key)))
            self.media = tuple(sorted(set(names)))
        elif name == "ns":
            self._page.namespace = text
        else:
            setattr(self._page, name, text)

    def _finish(self) -> None:
        page = self._page
        if not page.namespace:  # dumps from before 2011 give it only as a title prefix
            prefix, colon, _ = page.title.partition(":")
            page.namespace = "other" if colon and prefix in self._prefixes.values() else "0"
        self.last = page.title
        self._done.append(page)
