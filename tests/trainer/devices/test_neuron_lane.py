"""An installation's lane, and what is wrong with it; installations are made up, with versions that AWS documents."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from tests.helpers.neuron_machine import install_program
from trainer.devices import neuron_lane
from trainer.devices.neuron_lane import (
    NATIVE,
    XLA,
    Installation,
    cores,
    lane_of,
    peak_of,
    problems,
    require_lane,
)
from trainer.devices.select import automatic, resolve

_XLA = {
    "torch": "2.9.1", "torch-xla": "2.9.0", "torch-neuronx": "2.9.0.2.13.26312", "neuronx-cc": "2.24.8799.0",
    "libneuronxla": "2.2.16408.0",
}  # fmt: skip
_NATIVE = {"torch": "2.13.0+cpu", "torch-neuronx": "2.13.3.0.1", "neuronx-cc": "2.28.7631.0", "nki": "0.7.0"}
_NATIVE_2_14 = {**_NATIVE, "torch": "2.14.0+cpu", "torch-neuronx": "2.14.3.0.7"}
_BETA = {**_NATIVE, "torch": "2.12.0", "torch-neuronx": "2.12.1"}


def without(versions: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in versions.items() if key != name}


def native(versions: dict[str, str], instance: str = "trn2.48xlarge") -> Installation:
    return Installation(versions, has_native_device=True, instance=instance)


#: Installation, its lane (None: no lane), and words of the first problem (no words: it can train).
CASES = {
    "nothing": (
        Installation({"torch": "2.9.1"}), None,
        ["torch-neuronx, which is not installed", "'.[neuron-xla]' or '.[neuron-native]'"],
    ),
    "empty packages": (
        Installation({**_XLA, "torch-neuronx": "1.0"}, empty=("torch-neuronx",)),
        None,
        ["torch-neuronx 1.0", "empty stand-ins", "pip uninstall -y torch-neuronx"],
    ),
    "xla on trn1": (Installation(_XLA, instance="trn1.32xlarge"), XLA, []),
    "xla on trn2": (Installation(_XLA, instance="trn2.48xlarge"), XLA, []),
    "xla on a machine that does not tell": (Installation(_XLA, instance="Standard PC"), XLA, []),
    "xla on trn3": (
        Installation(_XLA, instance="trn3.48xlarge"), XLA, ["does not train on trn3.48xlarge", "trn1 and trn2"],
    ),
    "xla without torch-xla": (Installation(without(_XLA, "torch-xla")), XLA, ["needs torch-xla", "neuron-xla]"]),
    "xla with another torch": (
        Installation({**_XLA, "torch": "2.10.0"}), XLA, ["torch-neuronx 2.9.0.2.13.26312 is not made for torch 2.10.0"],
    ),
    "xla with Python 3.13": (Installation(_XLA, python=(3, 13)), XLA, ["Python 3.11 to 3.12, this is 3.13"]),
    "native 2.13 on trn2": (native(_NATIVE), NATIVE, []),
    "native 2.14 on trn3": (native(_NATIVE_2_14, "trn3.48xlarge"), NATIVE, []),
    "native on trn1": (native(_NATIVE, "trn1.32xlarge"), NATIVE, ["does not train on trn1.32xlarge", "trn2 and trn3"]),
    "a native beta": (native(_BETA), NATIVE, []),
    "2.12 without torch.neuron": (Installation(_BETA), XLA, ["needs torch-xla"]),
    "native with torch-xla": (
        native({**_NATIVE, "torch-xla": "2.9.0"}), NATIVE, ["torch-xla 2.9.0", "exclude each other"],
    ),
    "native for another torch": (
        native({**_NATIVE, "torch": "2.14.0"}), NATIVE, ["2.13.3.0.1 is not made for torch 2.14.0"],
    ),
    "native that was not loaded": (Installation(_NATIVE), NATIVE, ["torch has no torch.neuron", "AUTOLOAD"]),
    "native with another's compile cache": (
        Installation(_NATIVE, has_native_device=True, cc_flags="-O1 --cache_dir /theirs --model-type=transformer"),
        NATIVE,
        ["NEURON_CC_FLAGS has --cache_dir /theirs", "NCC_EARG002", "remove it"],
    ),
    "xla with a compile cache": (Installation(_XLA, cc_flags="--cache_dir=/theirs"), XLA, []),
}  # fmt: skip


@pytest.mark.parametrize(("found", "lane", "words"), CASES.values(), ids=CASES.keys())
def test_the_lane_is_told_and_what_is_wrong_with_it(found: Installation, lane: str | None, words: list[str]) -> None:
    if lane is None:
        with pytest.raises(UserError):
            lane_of(found)
    else:
        assert lane_of(found)[0] == lane
    lines = problems(found)
    assert all("\n" not in line and ";" in line for line in lines)
    assert bool(lines) == bool(words)
    for word in words:
        assert word in lines[0]
    for wanted in (XLA, NATIVE):
        # Packages cannot be installed with a Python that they are not made for: only `--doctor` says so.
        if wanted == lane and (not words or "Python" in words[0]):
            assert f"torch-neuronx {found.versions['torch-neuronx']} is " in require_lane(found, wanted)
        else:
            with pytest.raises(UserError):
                require_lane(found, wanted)


@pytest.mark.parametrize(
    ("wanted", "instance", "python", "advised"),
    [
        (NATIVE, "trn2.48xlarge", (3, 12), [NATIVE]),
        (XLA, "trn2.48xlarge", (3, 12), [XLA]),
        ("neuron", "trn1.32xlarge", (3, 12), [XLA]),
        ("neuron", "trn1.32xlarge", (3, 14), [XLA]),  # in another Python: the machine cannot be another
        ("neuron", "trn2.48xlarge", (3, 11), [XLA]),
        ("neuron", "trn2.48xlarge", (3, 12), [XLA, NATIVE]),
        ("neuron", "trn2.48xlarge", (3, 13), [NATIVE]),
        ("neuron", "trn3.48xlarge", (3, 11), [NATIVE]),
        ("neuron", "Standard PC", (3, 12), [XLA, NATIVE]),
        ("neuron", "Standard PC", (3, 14), [NATIVE]),
    ],
)
@pytest.mark.parametrize("versions", [{}, {"torch-neuronx": "1.0"}], ids=["nothing", "empty packages"])
def test_a_lane_that_fits_is_to_be_installed(
    wanted: str, instance: str, python: tuple[int, int], advised: list[str], versions: dict[str, str]
) -> None:
    found = Installation(versions, empty=tuple(versions), python=python, instance=instance)
    with pytest.raises(UserError) as refused:
        lane_of(found, wanted)
    assert re.findall(r"'\.\[(.*?)\]'", str(refused.value)) == advised
    if wanted != "neuron":
        with pytest.raises(UserError) as required:
            require_lane(found, wanted)
        assert str(required.value) == str(refused.value)


@pytest.mark.parametrize(
    ("name", "logical", "peak"),
    [
        # AWS: 190 TFLOP/s for a chip of 2 cores, 667 and 671 for one of 8; trn2 and trn3 ranks have two by default.
        ("trn1.32xlarge", None, 95e12),
        ("trn1n.32xlarge", None, 95e12),
        ("trn2.48xlarge", None, 166.75e12),
        ("trn2.3xlarge", "1", 83.375e12),
        ("trn2u", None, 166.75e12),
        ("trn3", None, 167.75e12),
        ("trn3", "1", 83.875e12),
        ("inf2.48xlarge", None, None),
        ("Standard PC", None, None),
        ("", None, None),
    ],
)
def test_the_peak_is_that_of_a_logical_core(
    name: str, logical: str | None, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    if logical is not None:
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", logical)
    assert peak_of(name) == peak


@pytest.mark.parametrize("value", ["0", "two", "4", "-1"])
def test_a_logical_core_has_one_or_two_physical_ones(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", value)
    install_program(tmp_path, "neuron-ls", f"#!/bin/sh\necho '{json.dumps([_device(8)])}'\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for read in (cores, lambda: peak_of("trn2.48xlarge")):
        with pytest.raises(UserError, match=rf"NEURON_LOGICAL_NC_CONFIG is {value}; allowed: 1 or 2"):
            read()


def _device(count: int, in_use: int | None = None) -> dict[str, object]:
    return {"neuron_device": 0, "nc_count": count, **({"logical_neuroncore_config": in_use} if in_use else {})}


@pytest.mark.parametrize(
    ("answer", "logical", "total"),
    [
        ([_device(2)], None, 2),  # trn1.2xlarge, as recorded by third parties, like the next two
        ([_device(4, 2)], None, 4),  # trn2.3xlarge
        ([_device(4, 2)] * 16, None, 64),  # trn2.48xlarge
        ([_device(4, 2)] * 16, "1", 128),
        ([_device(8, 1)] * 16, "1", 128),
        ([_device(8, 1)], None, 8),  # by the machine's own configuration
        ([_device(8)] * 16, None, 64),  # by physical cores, without the other field
        ([_device(8, 2)] * 16, None, 64),
        ({"instance_type": "trn2.3xlarge", "tags": [], "neuron_devices": [_device(4, 2)]}, None, 4),
    ],
)
def test_logical_cores_are_counted(
    answer: object, logical: str | None, total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`neuron-ls -j`, and what replaces it from SDK 2.34 on, whose fields are not known yet."""
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    if logical is not None:
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", logical)
    options = "-j" if isinstance(answer, list) else "--output-format json"
    install_program(tmp_path, "neuron-ls", f"#!/bin/sh\n[ \"$*\" = '{options}' ] && echo '{json.dumps(answer)}'\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert cores() == total


def test_a_driver_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_program(tmp_path, "neuron-ls", "#!/bin/sh\necho 'no neuron device found' >&2; exit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(UserError, match=r"neuron-ls -j: no neuron device found; check the Neuron driver"):
        cores()
    install_program(tmp_path, "neuron-ls", "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(neuron_lane, "_ANSWER_S", 0.2)
    with pytest.raises(UserError, match=r"neuron-ls: no answer within 0.2 s; check the Neuron driver"):
        cores()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said: list[str] = []
    assert automatic(said.append) == "cpu"
    assert said == ["warning: device auto is the CPU: neuron-ls: no answer within 0.2 s; check the Neuron driver"]


@pytest.mark.parametrize(("lane", "device"), [(NATIVE, NATIVE), (XLA, "cpu"), (None, "cpu")])
def test_without_xla_there_is_still_the_native_lane(
    lane: str | None, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DISABLE_XLA concerns what needs XLA."""
    found = {NATIVE: native(_NATIVE), XLA: Installation(_XLA), None: Installation({})}[lane]
    monkeypatch.setattr(Installation, "of_machine", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if found.has_native_device:
        monkeypatch.setattr(torch, "neuron", object(), raising=False)
    install_program(tmp_path, "neuron-ls", f"#!/bin/sh\necho '{json.dumps([_device(8)])}'\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("DISABLE_XLA", "1")
    said: list[str] = []
    assert [resolve("neuron", said.append), resolve("auto", said.append)] == [device, device]
    assert [line.split(":")[0] for line in said] == ([] if lane == NATIVE else ["DISABLE_XLA=1"])
