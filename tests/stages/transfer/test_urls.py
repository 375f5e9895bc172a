"""What an address names is decided in the same way wherever one is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.addresses import local_path, url_scheme
from common.errors import UserError
from common.hashing import InputHashes
from common.secrets import Secret
from stages.mnist import file_address
from stages.store.options import StoreOptions
from stages.store.publish import Folder, scheme_of
from stages.transfer.checkpoint_source import is_remote, local_source
from stages.transfer.urls import Transport, open_source, source_identity

#: Everything that takes an address, in which a file:// one is allowed.
TAKES_ADDRESS: dict[str, Callable[[str], object]] = {
    "download": lambda url: open_source(Secret.address(url), Transport()),
    "identity": lambda url: source_identity(Secret.address(url), InputHashes()),
    "checkpoint": lambda url: local_source(Secret.address(url)),
    "store": lambda url: StoreOptions(url=Secret.address(url)),
    "publish": Folder,
}


@pytest.mark.parametrize("take", TAKES_ADDRESS.values(), ids=TAKES_ADDRESS)
def test_what_is_not_an_address_or_names_a_host_is_refused(take: Callable[[str], object]) -> None:
    with pytest.raises(UserError, match=r"http://\[x is not an address"):
        take("http://[x")
    with pytest.raises(UserError, match="file://elsewhere/x names the host elsewhere; write file:///"):
        take("file://elsewhere/x")


@pytest.mark.parametrize("ask", [is_remote, scheme_of, lambda url: file_address(Secret.address(url), "file")])
def test_what_has_no_scheme_is_refused_by_those_that_ask_for_it(ask: Callable[[str], object]) -> None:
    with pytest.raises(UserError, match=r"http://\[x is not an address"):
        ask("http://[x")


@pytest.mark.parametrize("password", ["a[b", "a]b", "a\u2100b"])
def test_a_password_may_hold_what_a_host_may_not(password: str) -> None:
    assert url_scheme(Secret.address(f"https://me:{password}@host/x.tar")) == "https"
    assert is_remote(Secret.address(f"https://me:{password}@host/x.tar"))


def test_file_addresses_are_decoded_and_plain_paths_are_not(tmp_path: Path) -> None:
    for name in ("a model", "50%20"):
        (tmp_path / name).mkdir()
        url = (tmp_path / name).as_uri()
        assert "%" in url
        for given in (url, url.replace("file://", "file://localhost"), str(tmp_path / name)):
            assert local_path(given) == tmp_path / name
            assert local_source(Secret.address(given)) == tmp_path / name
            assert StoreOptions(url=Secret.address(given)).place == str(tmp_path / name)
            assert Folder(given).folder == (tmp_path / name).resolve()
