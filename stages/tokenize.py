"""Text → token ids, computed once and shared by both phases."""

from __future__ import annotations

import argparse

from common.hashing import InputHashes
from common.process import available_cores
from stages.directory.builders import Builders
from stages.directory.command import run
from stages.directory.options import parse, stage_parser
from stages.text.corpus import TokenizeOptions


def parser() -> argparse.ArgumentParser:
    return stage_parser(TokenizeOptions, __doc__)


def main() -> None:
    options, out = parse(TokenizeOptions, parser())
    from stages.tokens.encode import tokenize_corpus
    from trainer.data.vocabulary import read_vocabulary

    processes = options.processes or available_cores()
    hashes = InputHashes.beside(out)
    if options.vocab_file is not None:
        read_vocabulary(options.vocab_file)  # refuse a bad one before any work is done
    builders = Builders.here(options.builders)
    with builders.begin(out, lambda: options.identity(hashes)) as work:
        counts = tokenize_corpus(work, options, processes=processes, hashes=hashes, builders=builders)
    if not builders.is_first:
        return
    documents = f"{counts['documents']:,} documents and {counts['held_out_documents']:,} held out"
    print(f"{documents}, {counts['tokens']:,} tokens: {out}")


if __name__ == "__main__":
    run(main)
