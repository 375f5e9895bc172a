"""What runs after what: `luigi --module pipeline BertPhase2`, or `MnistMlp`.

Imports neither torch nor transformers nor h5py: a finished pipeline answers in under a second.
"""

import configparser
import gc
import sys

from common.process import print_in_any_locale
from pipeline.settings.config_file import not_utf8

try:
    from pipeline import luigi_adapters
except configparser.Error as error:  # luigi reads the settings files when it is imported
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    sys.exit(35)
except UnicodeDecodeError as error:
    print(f"error: {not_utf8()} is not UTF-8 ({error}); save it in that encoding", file=sys.stderr)
    sys.exit(35)
from pipeline.settings.load import add_defaults

add_defaults()
print_in_any_locale()
luigi_adapters.install()

# Registers with luigi all tasks, which read the settings when they are created, and the header of a run.
from pipeline import header  # noqa: E402, F401
from pipeline.tasks import everything, sweep  # noqa: E402, F401
from pipeline.tasks.nights import nightly  # noqa: E402, F401

# What is imported by now is never garbage; a collection that looks at it all takes 30 ms.
gc.freeze()
