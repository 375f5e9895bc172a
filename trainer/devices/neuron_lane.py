"""Which of AWS's two lanes to Trainium is installed, whether it is complete, and whether it fits this machine.

Both are called torch-neuronx. `neuron-xla` is PyTorch/XLA: trained with up to SDK 2.29.1, on trn1 and trn2.
`neuron-native` is a device of torch's own, for trn2 and trn3.

Versions, Python versions and instances are those of AWS's documentation (SDK 2.33) and of aws-neuron/aws-neuron-sdk.
Private betas 2.11 and 2.12 are said to have been native, too: there `torch.neuron` decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from common.errors import UserError
from trainer.devices.neuron_cache import CACHE_DIR, CC_FLAGS

XLA, NATIVE = "neuron-xla", "neuron-native"
#: Where the packages come from; the packages of the same names in the public registry are empty.
REPOSITORY = "pip.repos.neuron.amazonaws.com"
#: What each lane needs beside torch.
PACKAGES = {
    XLA: ("torch-neuronx", "torch-xla", "neuronx-cc", "libneuronxla"),
    NATIVE: ("torch-neuronx", "neuronx-cc", "nki"),
}
#: The first public version of the native lane, and the first of its private betas.
_NATIVE, _NATIVE_BETA = (2, 13), (2, 11)
#: Python versions that AWS builds each lane for, of those that this project runs with.
_PYTHONS = {XLA: ((3, 11), (3, 12)), NATIVE: ((3, 12), (3, 14))}
#: Families of instances that each lane runs on.
_INSTANCES = {XLA: ("trn1", "trn2"), NATIVE: ("trn2", "trn3")}
#: The physical machine's name in its firmware; on EC2 the type of the instance.
_PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")
#: Family of instances → physical cores and dense bf16 peak, FLOP/s, of a chip (AWS's pages on each chip).
_CHIPS = {"trn1": (2, 190e12), "trn2": (8, 667e12), "trn3": (8, 671e12)}
#: Physical cores in a logical one: what the runtime and the compiler read, and AWS's default on trn2 and trn3.
_LOGICAL_CORE, _PAIR = "NEURON_LOGICAL_NC_CONFIG", 2
#: Seconds within which `neuron-ls` has to answer.
_ANSWER_S = 60


@dataclass(frozen=True)
class Installation:
    """What is installed here, as far as it tells the lanes apart."""

    #: Version of each package that is installed, torch among them.
    versions: Mapping[str, str]
    #: Those of them that are the public registry's empty stand-ins.
    empty: tuple[str, ...] = ()
    #: Whether torch has `torch.neuron`.
    has_native_device: bool = False
    python: tuple[int, int] = (3, 12)
    #: The type of the instance, such as trn1.32xlarge; another text elsewhere.
    instance: str = ""
    #: The user's flags for neuronx-cc.
    cc_flags: str = ""

    @classmethod
    def of_machine(cls) -> Installation:
        import torch  # only this needs it

        versions, empty = {}, []
        for name in ("torch", *dict.fromkeys((*PACKAGES[XLA], *PACKAGES[NATIVE], "neuronx-distributed"))):
            try:
                about = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                continue
            versions[name] = about.version
            if "WRONG PACKAGE" in (about.read_text("METADATA") or ""):
                empty.append(name)
        here = sys.version_info[:2], instance_type(), os.environ.get(CC_FLAGS, "")
        return cls(versions, tuple(empty), hasattr(torch, "neuron"), *here)

    def release(self, name: str) -> tuple[int, int]:
        """The first two numbers of a package's version."""
        major, minor = re.findall(r"\d+", self.versions[name])[:2]
        return int(major), int(minor)


def instance_type() -> str:
    """As in `Installation.instance`."""
    return _PRODUCT.read_text(encoding="utf-8").strip() if _PRODUCT.exists() else ""


def lane_of(found: Installation, wanted: str = "neuron") -> tuple[str, str]:
    """The lane that is installed, and how it was recognised. Raises `UserError` if none is, with what to install for
    the device `wanted`."""
    if found.empty:
        raise UserError(
            f"{', '.join(f'{name} {found.versions[name]}' for name in found.empty)} from the public registry are empty "
            f"stand-ins; pip uninstall -y {' '.join(found.empty)}, then {_install(*_fitting(found, wanted))}"
        )
    if "torch-neuronx" not in found.versions:
        raise UserError(
            f"device {wanted} needs torch-neuronx, which is not installed; {_install(*_fitting(found, wanted))}"
        )
    name, release = f"torch-neuronx {found.versions['torch-neuronx']}", found.release("torch-neuronx")
    if release >= _NATIVE:
        return NATIVE, f"{name} is native, as all are from 2.13 on"
    if release >= _NATIVE_BETA and found.has_native_device:
        return NATIVE, f"{name} is a private beta with torch.neuron"
    return XLA, f"{name} is below 2.13, where native ones begin"


def _fitting(found: Installation, wanted: str) -> list[str]:
    """The lanes to install for the device `wanted`: for `neuron` those for this machine and, if any is, this Python."""
    if wanted in PACKAGES:
        return [wanted]
    lanes = [lane for lane in PACKAGES if not any(_wrong_machine(found, lane))] or [*PACKAGES]
    return [lane for lane in lanes if not any(_wrong_python(found, lane))] or lanes


def problems(found: Installation) -> list[str]:
    """What keeps this machine from training with what is installed, and the remedy: one line each."""
    try:
        lane, _ = lane_of(found)
    except UserError as error:
        return [str(error)]
    return [*_reasons(found, lane), *_wrong_python(found, lane)]


def _reasons(found: Installation, lane: str) -> list[str]:
    """As `problems`, without Python's version."""
    return [*_wrong_packages(found, lane), *_wrong_machine(found, lane), *_wrong_flags(found, lane)]


def _wrong_packages(found: Installation, lane: str) -> Iterator[str]:
    versions = found.versions
    for package in PACKAGES[lane]:
        if package not in versions:
            yield f"{lane} needs {package}, which is not installed; {_install(lane)}"
        elif package.startswith("torch-") and found.release(package) != found.release("torch"):
            yield f"{package} {versions[package]} is not made for torch {versions['torch']}; {_install(lane)}"
    if lane == NATIVE and "torch-xla" in versions:
        yield f"torch-xla {versions['torch-xla']} and {lane} exclude each other; make a new environment for either"
    if lane == NATIVE and not found.has_native_device:
        yield f"torch has no torch.neuron; unset TORCH_DEVICE_BACKEND_AUTOLOAD, or reinstall: {_install(lane)}"


def _wrong_machine(found: Installation, lane: str) -> Iterator[str]:
    family = found.instance.partition(".")[0]
    if family.startswith(("trn", "inf")) and not family.startswith(_INSTANCES[lane]):
        fitting = " and ".join(_INSTANCES[lane])
        yield f"{lane} does not train on {found.instance}, but on {fitting}; use one of those, or the other lane"


def _wrong_flags(found: Installation, lane: str) -> Iterator[str]:
    if lane == NATIVE and (cache := CACHE_DIR.search(found.cc_flags)):
        yield (
            f"{CC_FLAGS} has {cache[0].strip()}, which {lane}'s compiler refuses (NCC_EARG002); remove it from there: "
            f"--compile_cache and TORCH_NEURONX_NEFF_CACHE_DIR name this lane's cache"
        )


def _wrong_python(found: Installation, lane: str) -> Iterator[str]:
    lowest, highest = _PYTHONS[lane]
    if not lowest <= found.python <= highest:
        made, this = f"{_dotted(lowest)} to {_dotted(highest)}", _dotted(found.python)
        yield f"{lane} is made for Python {made}, this is {this}; make a new environment"


def require_lane(found: Installation, wanted: str) -> str:
    """How the lane `wanted` was recognised. Raises `UserError` unless it is installed, complete and fits the machine.

    Python's version is not checked here: what has been imported runs with it.
    """
    lane, reason = lane_of(found, wanted)
    if lane != wanted:
        raise UserError(
            f"device {wanted}, but {reason}; choose device {lane}, or in a new environment {_install(wanted)}"
        )
    for problem in _reasons(found, lane):
        raise UserError(problem)
    return reason


def require_at_most_fp32(precision: str, lane: str) -> None:
    """Raises `UserError`."""
    if precision == "fp64":
        raise UserError(f"precision fp64 on {lane}, which computes in fp32 at most; use fp32")


def _install(*lanes: str) -> str:
    extras = " or ".join(f"'.[{lane}]'" for lane in lanes)
    return f"pip install --extra-index-url=https://{REPOSITORY} -e {extras} (docs/trainium.md)"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def neuron_ls() -> str | None:
    """The path of AWS's tool; None if it is not here."""
    return shutil.which("neuron-ls") or shutil.which("/opt/aws/neuron/bin/neuron-ls")


def cores() -> int:
    """Number of logical NeuronCores of this machine, from `neuron-ls`. Raises `UserError`."""
    program = neuron_ls()
    if program is None:
        raise UserError("neuron-ls not found: is this a Trainium instance with aws-neuronx-tools (docs/trainium.md)?")
    said = ""
    # SDK 2.34 replaces -j by the other option, with fields around the list of devices.
    for options in (["-j"], ["--output-format", "json"]):
        try:
            answer = subprocess.run([program, *options], capture_output=True, text=True, timeout=_ANSWER_S, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"neuron-ls: no answer within {_ANSWER_S} s; check the Neuron driver") from None
        with contextlib.suppress(ValueError, KeyError, TypeError, StopIteration):
            return sum(map(_logical_cores, _devices(json.loads(answer.stdout))))
        said = said or (answer.stderr or answer.stdout).strip()
    raise UserError(f"neuron-ls -j: {said.splitlines()[-1] if said else 'no answer'}; check the Neuron driver")


def _devices(answer: Any) -> list[dict[str, Any]]:
    """The list of devices in an answer of `neuron-ls`: all of it, or one of its fields."""
    lists: list[Any] = [answer] if isinstance(answer, list) else [v for v in answer.values() if isinstance(v, list)]
    return next(devices for devices in lists if devices and "nc_count" in devices[0])


def _logical_cores(device: Mapping[str, Any]) -> int:
    """Logical cores of a device, whether `neuron-ls` counts these (as seen on trn2) or physical ones."""
    count, most = int(device["nc_count"]), max(physical for physical, _ in _CHIPS.values())
    in_use = int(device.get("logical_neuroncore_config") or (_PAIR if count == most else 1))
    return min(count * in_use, most) // _logical_core(in_use)


def _logical_core(default: int) -> int:
    """Physical cores in a logical one. Raises `UserError`."""
    given = os.environ.get(_LOGICAL_CORE)
    if given and given not in ("1", "2"):
        raise UserError(f"{_LOGICAL_CORE} is {given}; allowed: 1 or 2, or leave it unset")
    return int(given or default)


def peak_of(name: str) -> float | None:
    """The dense bf16 peak, FLOP/s, of a logical core; `name`: of an instance (trn2.48xlarge) or a chip (trn2, trn2u).
    None: not known. Raises `UserError`."""
    family = name[:4]
    if family not in _CHIPS:
        return None
    physical, peak = _CHIPS[family]
    default = 1 if family == "trn1" else _PAIR
    return peak / physical * _logical_core(default)
