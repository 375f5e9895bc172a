"""MNIST, or any data in its four-file format → a data set of this project: fetched and checked."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.addresses import url_scheme
from common.errors import UserError
from common.files import durable_file
from common.hashing import InputHashes, changed
from common.options import option
from common.secrets import Secret
from stages.directory.command import run
from stages.directory.manifest import Output, StageDirectory
from stages.directory.options import StageOptions, parse, stage_parser
from stages.transfer.urls import Transport, file_identity, open_source, source_identity

#: File name → sha256 of the original. (Their md5 sums match those that torchvision checks.)
FILES = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


@dataclass(frozen=True, kw_only=True)
class MnistOptions(Transport, StageOptions):
    """The source of MNIST's files, and whether they must be the original ones."""

    module: ClassVar = "stages.mnist"
    stage: ClassVar = "download_mnist"

    url: Secret = option(
        names=("url",),
        metavar="URL",
        help=f"https://, s3://, file:// or path of the folder with {', '.join(FILES)}",
    )
    checksums: str = option(
        "mnist", choices=("mnist", "none"), help="mnist: only the original files; none: any files in the format"
    )

    def inputs(self, hashes: InputHashes, upstream: Mapping[str, str]) -> dict[str, Any]:
        return source_inputs(self.url, hashes)


def source_inputs(url: Secret, hashes: InputHashes) -> dict[str, str]:
    """The identity of each file under `url`. Raises `UserError` if a local file is missing."""
    try:
        return {name: source_identity(file_address(url, name), hashes) for name in FILES}
    except UserError as error:
        seen = str(error).partition(";")[0]
        raise UserError(f"{seen}; give the folder or address that has MNIST's files {', '.join(FILES)}") from None


def file_address(url: Secret, name: str) -> Secret:
    """The address of one of MNIST's files in the folder `url`. Raises `UserError`."""
    if not url:
        raise UserError("the address of MNIST is empty")
    whole = url.reveal()
    folder, question, query = whole.partition("?") if url_scheme(url) in ("http", "https") else (whole, "", "")
    return Secret.address(f"{folder.rstrip('/')}/{name}{question}{query}")


def download_mnist(work: StageDirectory, options: MnistOptions) -> dict[str, Any]:
    """Fetch the four files into `work` and complete it; returns the counts.

    Raises `UserError` if a file is missing, not the original one, or not in the format.
    """
    from trainer.workloads.mnist import HELD_OUT, TRAINING, Images

    for name, original in FILES.items():
        if not (work.path / name).exists():
            sha256 = original if options.checksums == "mnist" else None
            _fetch_file(work, file_address(options.url, name), work.path / name, sha256, options)
    try:
        training, held_out = Images(work.path, TRAINING), Images(work.path, HELD_OUT)
    except UserError:
        for name in FILES:
            (work.path / name).unlink(missing_ok=True)  # so that the next run fetches them again
        raise
    counts = {"training_images": len(training), "held_out_images": len(held_out)}
    work.finish([Output.of(work.path, work.path / name) for name in FILES], counts)
    return counts


def _fetch_file(work: StageDirectory, url: Secret, final: Path, sha256: str | None, transport: Transport) -> None:
    """Fetch or copy `url` to `final`; it must have this sha256 (None: any)."""
    from stages.transfer.fetch import fetch

    source = open_source(url, transport)
    if not isinstance(source, Path):
        fetch(
            source, work, final, connections=transport.connections, least_rate=transport.least_rate, sha256=sha256,
            begin=lambda version, missing, is_same: None,
        )  # fmt: skip
        return
    with durable_file(final) as file:
        file.write(source.read_bytes())
        if work.identity.inputs[final.name] != file_identity(file.sha256):
            raise changed(source)
        if sha256 is not None and file.sha256 != sha256:
            raise UserError(
                f"{source} has the sha256 {file.sha256}, MNIST's has {sha256}; fetch it again, or allow files other "
                f"than the originals with checksums = none"
            )


def parser() -> argparse.ArgumentParser:
    return stage_parser(MnistOptions, __doc__)


def main() -> None:
    options, out = parse(MnistOptions, parser())
    with StageDirectory.begin(out, lambda: options.identity(InputHashes.beside(out))) as work:
        counts = download_mnist(work, options)
    print(f"{counts['training_images']:,} training and {counts['held_out_images']:,} held-out images: {out}")


if __name__ == "__main__":
    run(main)
