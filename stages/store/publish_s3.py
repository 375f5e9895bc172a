"""Publish a model under a prefix in S3. S3 has no rename: config.json, without which nothing loads the model, is
deleted first and uploaded last."""

from __future__ import annotations

from common.files import failpoint
from stages.store.backend import Report, one_at_a_time
from stages.store.files import measured
from stages.store.options import StoreOptions
from stages.store.publish import CONFIG, Publication
from stages.store.s3 import S3Backend


class S3Prefix:
    """`s3://bucket/prefix`. Large files are sent in parts, continuing after those that an interrupted run has sent."""

    path, shows_progress = "PATH", False

    def __init__(self, options: StoreOptions) -> None:
        self._store = S3Backend(options)
        self.address = self._store.url

    def check(self, publication: Publication) -> None:
        """Do nothing: the options are already checked."""

    def publish(self, publication: Publication, report: Report) -> None:
        report, there = one_at_a_time(report), self._there(publication)
        if CONFIG in there:
            self._store.delete([CONFIG])
        for name in sorted(publication.files, key=lambda name: (name == CONFIG, name)):
            if name == CONFIG:
                self._store.delete(publication.superseded(there))
            file = measured(publication.files[name], name)
            self._store.upload(name, publication.files[name], file.bytes, file.sha256, report)
            failpoint(f"publish:{name}")

    def _there(self, publication: Publication) -> set[str]:
        """Names of an earlier publication's files. Folders below the prefix, and other files, are not looked at."""
        found = set(self._store.present([pattern for pattern in publication.patterns if "*" not in pattern]))
        for pattern in publication.patterns:
            if "*" in pattern:
                found |= {entry.key for entry in self._store.list(pattern.partition("*")[0])}
        return {name for name in found if publication.is_of_a_model(name)}
