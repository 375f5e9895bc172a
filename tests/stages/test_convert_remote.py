"""A checkpoint on the network: fetched, converted, and not kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from common.errors import CheckpointError
from common.secrets import Secret
from stages.directory.manifest import Identity, StageDirectory
from stages.transfer.checkpoint_source import brought
from stages.transfer.urls import Transport
from tests.helpers.checkpoints import CONFIG, snapshot, write_native
from tests.helpers.support import assert_one_line_error, forked, tensors
from tests.helpers.web import serving, status

IDENTITY = Identity("convert_checkpoint", 1)


def test_a_checkpoint_is_fetched_and_its_name_says_the_step(tmp_path: Path) -> None:
    native = write_native(tmp_path, snapshot(step=7))
    assert forked("stages.convert", native, tmp_path / "script", "--to", "pt").returncode == 0
    out, script, config = tmp_path / "out", tmp_path / "script" / "ckpt_7.pt", tmp_path / "model.json"
    config.write_text(json.dumps(CONFIG.to_hugging_face()))
    assert forked("stages.convert", script, tmp_path / "local", "--config", config).returncode == 0
    with serving(script.read_bytes(), "/checkpoints/ckpt_7.pt?version=1") as web:
        done = forked("stages.convert", web.url, out, "--config", tmp_path / "config.json")
        assert_one_line_error(done, "config.json")
        done = forked("stages.convert", web.url, out, "--config", config)
    assert done.returncode == 0, done.stdout
    assert "step 7, " in done.stdout
    ours, theirs = tensors(out / "checkpoint"), tensors(tmp_path / "local" / "checkpoint")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint", "lock", "manifest.json", "stage.json"]


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    with serving(b"", "/ckpt_7.pt") as web:
        web.probe_faults.append(status(404))
        assert_one_line_error(forked("stages.convert", web.url, tmp_path / "out"), "404", web.url)
        done = forked("stages.convert", web.url, tmp_path / "out", "--connections", 0)
        assert_one_line_error(done, "--connections is 0; allowed: a whole number from 1 to 64")


def test_what_reads_local_files_only_says_so(tmp_path: Path) -> None:
    url = "https://example.com/ckpt_7.pt"
    assert_one_line_error(forked("stages.convert", "--inspect", url), url, "not on this machine", "stages.convert")
    assert_one_line_error(forked("stages.merge", url, tmp_path / "out"), url, "not on this machine", "stages.convert")


@pytest.mark.parametrize("path", ["/?file=ckpt_7.pt", "/a/.."])
def test_an_address_that_names_no_file_costs_nothing_but_the_download(tmp_path: Path, path: str) -> None:
    """What the stage has made beside the download stays."""
    with serving(b"a checkpoint", path) as web, StageDirectory.begin(tmp_path, lambda: IDENTITY) as work:
        with brought(Secret.address(web.url), work, Transport()) as fetched:
            assert fetched.read_bytes() == b"a checkpoint"
            (tmp_path / "checkpoint").mkdir()
        assert (tmp_path / "checkpoint").is_dir()
        assert not list(tmp_path.glob("download*"))


def test_a_damaged_checkpoint_is_fetched_again_once_the_server_has_another(tmp_path: Path) -> None:
    with serving(b"damaged", "/ckpt_7.pt") as web, StageDirectory.begin(tmp_path, lambda: IDENTITY) as work:
        source = Secret.address(web.url)
        for is_fetched in (True, False):  # the same one only once
            web.parts.clear()
            with pytest.raises(CheckpointError, match="it is damaged"), brought(source, work, Transport()):
                raise CheckpointError("it is damaged")
            assert bool(web.parts) is is_fetched
        web.replace(b"whole")
        with brought(source, work, Transport()) as fetched:
            assert fetched.read_bytes() == b"whole"
