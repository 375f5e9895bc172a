"""`kernels.c`, compiled at first use for the CPU at hand and kept in the user's cache directory."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
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
    "norm_backward": "ppppppppppnnnsdt",
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


@functools.cache
def library() -> Library | None:
    """None, and one line that says why, where it cannot be compiled or loaded: torch's own operations are used then."""
    try:
        return Library(_compiled())
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        log(f"note: the CPU kernels are not used, torch's own operations are, which are slower: {one_line(error)}")
        return None


def _compiled() -> Path:
    """The library's file. Raises OSError, SubprocessError."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise OSError("there is no C compiler; install gcc, or set CC")
    runtime = _openmp_runtime()
    options = (*_OPTIONS, *(_X86_OPTIONS if platform.machine() == "x86_64" else ()))
    info = processor.info()
    decides = (_SOURCE.read_bytes(), repr((compiler, options, runtime, platform.machine(), info.get("model name"),
               info.get("flags"))).encode())  # fmt: skip
    digest = hashlib.sha256(b"".join(decides)).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bert-pretraining"
    path = folder / f"cpu-kernels-{digest}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            made, objects = Path(name, "kernels.so"), Path(name, "kernels.o")
            _run(compiler, *options, "-c", str(_SOURCE), "-o", str(objects))
            # The runtime by its path: `-lgomp` could be a second one, whose threads would compete with torch's.
            _run(compiler, "-shared", str(objects), runtime, "-lm", "-Wl,--no-undefined", "-o", str(made))
            os.replace(made, path)  # several processes may compile at once
    return path


def _openmp_runtime() -> str:
    """The file of the OpenMP runtime that torch has loaded. Raises OSError."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    found = {line.split(maxsplit=5)[5] for line in maps if re.search(r"/lib(gomp|iomp5|omp)[-.][^/]*$", line)}
    if len(found) != 1:
        raise OSError(f"torch has {len(found) or 'no'} OpenMP runtimes loaded, and needs one")
    return found.pop()


def _run(*words: str) -> None:
    """Raises SubprocessError with what the compiler said."""
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=_COMPILES_S, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise subprocess.SubprocessError(f"{words[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
