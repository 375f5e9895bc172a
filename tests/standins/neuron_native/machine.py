"""A stand-in for a machine with native torch-neuronx: the package beside this file, as if it were installed.

The device is torch's own PrivateUse1 device, in host memory, registered by device.cpp as AWS's package registers its
device. All of the code under test runs; the arithmetic units, their compiler and their links are not real.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from tests.helpers.neuron_machine import hardware, install_package

_HERE = Path(__file__).parent
#: An environment holds one lane. torch-xla is installed here for other tests: on the stand-in machine it is not.
_HIDE = """
from importlib import metadata
_found = metadata.Distribution.from_name.__func__

def from_name(cls, name):
    if name in ("torch-xla", "libneuronxla"):
        raise metadata.PackageNotFoundError(name)
    return _found(cls, name)

metadata.Distribution.from_name = classmethod(from_name)
"""
#: A command that a server forks imports the package before it begins, in its own environment, as with `import torch`.
#: (Where torch imports a package, the project starts no server; tests do.)
_FORK = """
import os, runpy, sys

def run_module(*words, run=runpy.run_module, **named):
    import torch
    torch._import_device_backends()
    return run(*words, **named)

if "common.fork_server" in sys.orig_argv:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    runpy.run_module = run_module
"""
_ENTRY_POINTS = """
[torch.backends]
torch_neuronx = torch_neuronx:_autoload
[torch_dynamo_backends]
neuron = torch_neuronx:_compile
"""


def build(folder: Path) -> Path:
    """Compile device.cpp into `folder`, once for all processes that name it; returns the module. It takes 30 s."""
    folder.mkdir(parents=True, exist_ok=True)
    known_by = f"{torch.__version__} {sys.version} {(_HERE / 'device.cpp').read_text()}"
    module = folder / f"_device-{hashlib.sha256(known_by.encode()).hexdigest()[:10]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not module.exists():
            home = Path(torch.__file__).parent
            headers = [home / "include", home / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
            subprocess.run(
                [
                    *("g++", "-O0", "-std=c++17", "-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=_device"),
                    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
                    *(f"-isystem{header}" for header in headers),
                    *(str(_HERE / "device.cpp"), "-o", str(module.with_suffix(".part")), f"-L{home / 'lib'}"),
                    *("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
                ],
                check=True,
                timeout=300,
            )
            module.with_suffix(".part").rename(module)
    return module


def native_machine(folder: Path, module: Path, *, cores: int = 2) -> dict[str, str]:
    """The environment of the machine; `module`: from `build`."""
    site = folder / "site"
    shutil.copytree(_HERE / "torch_neuronx", site / "torch_neuronx", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "torch_neuronx" / "_device.so").symlink_to(module)
    # From 2.13 on the packages are native; torch itself is the real one, of another release.
    install_package(site, "torch_neuronx", "2.14.3.0.1", "Stand-in.")
    (site / "torch_neuronx.py").unlink()
    (site / "torch_neuronx-2.14.3.0.1.dist-info" / "entry_points.txt").write_text(_ENTRY_POINTS)
    install_package(site, "torch", "2.14.0+cpu", "Stand-in.")
    (site / "torch.py").unlink()
    install_package(site, "neuronx_cc", "2.28.7631.0", "Stand-in.")
    install_package(site, "nki", "0.7.0", "Stand-in.")
    (site / "sitecustomize.py").write_text(_HIDE + _FORK)
    return {**hardware(folder, cores=[cores]), "STANDIN_CORES": str(cores)}
