"""`kernels.c`, compiled at first use for the CPU at hand and kept in the user's cache directory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from common.console import log
from common.errors import one_line
from trainer.devices import processor

_SOURCE = Path(__file__).with_name("kernels.c")
#: `-fno-trapping-math` and `-fno-math-errno`: loops with comparisons and roots become vector instructions.
_OPTIONS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
#: Of x86: GCC prefers 256 bits for CPUs that it does not know.
_X86_OPTIONS = ("-mprefer-vector-width=512",)
_COMPILES_S = 120.0
#: Fields of /proc/cpuinfo that differ between cores, or from one moment to the next.
_VARYING = frozenset(
    {"processor", "core id", "apicid", "initial apicid", "physical id", "cpu MHz", "bogomips", "BogoMIPS"}
)
_TYPES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16"}
_ARGUMENTS = {
    "p": ctypes.c_void_p, "n": ctypes.c_int64, "x": ctypes.c_double, "s": ctypes.c_uint64, "d": ctypes.c_uint32,
    "t": ctypes.c_int,
}  # fmt: skip
#: The functions' arguments: pointers, sizes, real numbers, seeds, thresholds of dropout, threads.
_FUNCTIONS = {
    "gelu_forward": "pppnnt",
    "gelu_backward": "pppppnnnt",
    "norm_forward": "ppppppppnnxsdt",
    "norm_backward": "pppppppppppnnnsdt",
    "dropout": "ppnsdt",
    "softmax_forward": "ppppnnnxsdt",
    "softmax_backward": "pppnnnxsdt",
    "split_heads": "ppnnnnnnnt",
    "join_heads": "pppnnnnnnnt",
    "add": "ppnt",
    "embedding_backward": "pppnnnt",
    "cross_entropy_forward": "ppppnnnt",
    "cross_entropy_backward": "ppppnnnxt",
}


class Library:
    """The compiled functions, by name and type of numbers. Calls release Python's lock."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, AttributeError if the file is no library of these functions."""
        self.path = path
        loaded = ctypes.CDLL(str(path))
        self._functions = {}
        for name, arguments in _FUNCTIONS.items():
            for dtype, kind in _TYPES.items():
                function = getattr(loaded, f"{name}_{kind}")
                function.argtypes = [_ARGUMENTS[one] for one in arguments]
                function.restype = ctypes.c_int64 if name == "cross_entropy_forward" else None
                self._functions[name, dtype] = function

    def call(self, name: str, dtype: torch.dtype, *given: torch.Tensor | float | None) -> int | None:
        """Tensors, which must be contiguous, are passed as pointers; the number of threads is torch's."""
        assert all(one.is_contiguous() for one in given if isinstance(one, torch.Tensor))
        words = (one.data_ptr() if isinstance(one, torch.Tensor) else one for one in given)
        result: int | None = self._functions[name, dtype](*words, torch.get_num_threads())
        return result


_forbidden = False


def library() -> Library | None:
    """None where it cannot be compiled or loaded, which one line explains: torch's own operations are used then."""
    return None if _forbidden else _load()


def kind() -> str:
    """What computes, in words."""
    return "torch's kernels" if library() is None else "kernels in C"


def forbid(reason: str) -> None:
    """From here on have no library. All workers of a training must have one or none, or they compute in different
    ways."""
    global _forbidden
    _forbidden = True
    _log(reason)


@functools.cache
def _load() -> Library | None:
    try:
        compiler, runtime = _compiler(), _openmp_runtime()
        options = (*_OPTIONS, *(_X86_OPTIONS if platform.machine() == "x86_64" else ()))
        path = _folder() / f"cpu-kernels-{_digest(compiler, options, runtime)}.so"
        if path.exists():
            with contextlib.suppress(OSError, AttributeError):
                return Library(path)
            path.unlink(missing_ok=True)  # damaged, or made where another C library is
        return _compiled(path, compiler, options, runtime)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        _log(one_line(error))
        return None


def _log(reason: str) -> None:
    log(f"note: the CPU kernels are not used, torch's own operations are, which are slower: {reason}")


def _compiler() -> list[str]:
    """The command that `CC` names, or else `gcc` or `cc`. Raises OSError."""
    try:
        given = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise OSError(f"CC is {os.environ['CC']!r} ({error}); set it to a C compiler") from error
    for words in [given] if given else [["gcc"], ["cc"]]:
        if found := shutil.which(words[0]):
            return [found, *words[1:]]
    raise OSError("there is no C compiler; install gcc, or set CC")


def _openmp_runtime() -> str:
    """The file of the OpenMP runtime that torch has loaded. Raises OSError."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    loaded = {Path(line.split(maxsplit=5)[5]) for line in maps if re.search(r"/lib(gomp|iomp5|omp)[-.][^/]*$", line)}
    packages = Path(torch.__file__).resolve().parents[1]  # as in the maps
    torchs = {path for path in loaded if path.is_relative_to(packages / "torch") or path.parent.name == "torch.libs"}
    found = torchs or loaded
    if len(found) != 1:
        raise OSError(f"torch has {len(found) or 'no'} OpenMP runtimes loaded, and needs one")
    return str(found.pop())


def _folder() -> Path:
    """This user's directory of compiled kernels; a new one for this process alone if there can be none."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bert-pretraining"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        pass
    return Path(_temporary().name)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bert-pretraining-")


def _digest(compiler: Sequence[str], options: Sequence[str], runtime: str) -> str:
    """Of all that the library depends on: a home directory may be that of several kinds of machines."""
    version = _run(*compiler, "--version").partition("\n")[0]
    cpu = sorted((name, value) for name, value in processor.info().items() if name not in _VARYING)
    system = platform.machine(), platform.libc_ver()
    parts = (_SOURCE.read_bytes(), repr((compiler, version, options, runtime, system, cpu)).encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _compiled(path: Path, compiler: Sequence[str], options: Sequence[str], runtime: str) -> Library:
    """Compile it as `path`; another process may do the same. Raises OSError, AttributeError, SubprocessError."""
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as name:
        made, objects = Path(name, "kernels.so"), Path(name, "kernels.o")
        _run(*compiler, *options, "-c", str(_SOURCE), "-o", str(objects))
        # The runtime by its path: `-lgomp` could be a second one, whose threads would compete with torch's.
        _run(*compiler, "-shared", str(objects), runtime, "-lm", "-Wl,--no-undefined", "-o", str(made))
        with made.open("rb") as file:
            os.fsync(file.fileno())
        found = Library(made)
        try:
            os.link(made, path)
        except FileExistsError:  # another process was faster: a file that is loaded is not replaced
            pass
        except OSError:  # no hard links here
            os.replace(made, path)
        return found


def _run(*words: str) -> str:
    """Returns what the compiler printed. Raises OSError, SubprocessError with its errors."""
    # In a session of its own: what stops the training does not make this fail.
    done = subprocess.run(
        words, capture_output=True, text=True, errors="replace", timeout=_COMPILES_S, check=False,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    if done.returncode:
        raise subprocess.SubprocessError(f"{words[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout
