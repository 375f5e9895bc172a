"""Choose the backend for an address."""

from __future__ import annotations

from stages.store.backend import Backend
from stages.store.options import StoreOptions


def open_store(options: StoreOptions) -> Backend:
    """The store that the options name. Raises `UserError`."""
    if options.is_s3:
        from stages.store.s3 import S3Backend

        return S3Backend(options)
    from stages.store.folder import FolderBackend

    return FolderBackend(options)
