"""Which trackers get the numbers of a training. None of it decides a result; imports no torch and no tracker."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from typing import ClassVar

from common.addresses import url_scheme
from common.errors import UserError, suggestion
from common.options import check, option
from common.secrets import Secret
from trainer.registry import TENSORBOARD, TRACKERS

MLFLOW, WANDB = "mlflow", "wandb"
#: Values of `wandb_mode`.
WANDB_MODES = ("online", "offline")
_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
_HOW = {"group": "trackers", "decides": False}


@dataclass(frozen=True, kw_only=True)
class TrackerOptions:
    """The trackers, and how they are reached."""

    option_separator: ClassVar[str] = "_"

    names: str = option(
        TENSORBOARD, **_HOW, names=("--trackers",), metavar="A,B",
        help=f"where curves are shown, separated by commas: {', '.join(TRACKERS)}; empty: in metrics.jsonl alone",
    )  # fmt: skip
    project: str = option(
        "bert-pretraining", **_HOW, names=("--tracker_project",), help="project of W&B, experiment of MLflow"
    )
    mlflow_uri: Secret | None = option(
        None, **_HOW, metavar="ADDRESS", help="MLflow's server or database (default: MLFLOW_TRACKING_URI)"
    )
    wandb_mode: str = option(
        "online", **_HOW, choices=WANDB_MODES, help="offline: into OUTPUT_DIR/wandb, for `wandb sync`"
    )
    wait_s: float = option(
        30.0, **_HOW, names=("--tracker_wait",), least=0, unit="seconds",
        help="how long the end of a training waits for trackers, at most, in s",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        for name in self.chosen:
            if name not in TRACKERS:
                near = suggestion(name, TRACKERS)
                raise UserError(f"names = {self.names}: {name} is not a tracker (commas separate several); {near}")
        if self.remote and not self.project.strip():
            raise UserError(f"project = {self.project}: {self.remote[0]} needs the name of a project; give one")
        if WANDB in self.chosen and re.search(r"[/\\#?%:]", self.project):
            raise UserError(f"project = {self.project} is not a name W&B accepts; allowed: one without / \\ # ? % :")
        if MLFLOW in self.chosen and not mlflow_address(self):
            raise UserError(
                f"names = {self.names}: mlflow needs an address; give mlflow_uri, such as http://localhost:5000 or "
                "sqlite:////absolute/path.db, or set MLFLOW_TRACKING_URI"
            )
        if MLFLOW in self.chosen:
            _require_address(mlflow_address(self))

    @property
    def chosen(self) -> tuple[str, ...]:
        """The trackers' names."""
        return tuple(dict.fromkeys(filter(None, map(str.strip, self.names.split(",")))))

    @property
    def remote(self) -> tuple[str, ...]:
        """Those that are fed alongside the training."""
        return tuple(name for name in self.chosen if name != TENSORBOARD)

    def require_installed(self) -> None:
        """Raise `UserError` unless every tracker's library is there. The extra has MLflow's client, which reaches
        servers; databases need the whole of MLflow."""
        for name in self.remote:
            if importlib.util.find_spec(name) is None:
                raise UserError(
                    f"names = {self.names}: {name} needs a library that is not installed; install the extra "
                    f"(pip install 'bert-pretraining-pipeline[{name}]'), or leave {name} out"
                )
        if MLFLOW not in self.chosen:
            return
        address = mlflow_address(self)
        is_database = url_scheme(address).partition("+")[0] in _DATABASES
        if is_database and importlib.util.find_spec("sqlalchemy") is None:
            raise UserError(
                f"mlflow_uri = {address} is a database, which the extra's client cannot open; install all "
                f"of MLflow (pip install mlflow), or give the address of its server, http://…"
            )


def _require_address(given: Secret) -> None:
    if re.match(r"[\w.-]+:\d", given.reveal()):
        raise UserError(f"mlflow_uri = {given} is a host without a scheme; write http://{given}")
    try:
        url_scheme(given)
    except UserError as error:
        raise UserError(f"mlflow_uri = {error}") from None


def mlflow_address(options: TrackerOptions) -> Secret:
    """MLflow's server or database; empty if none is given."""
    return options.mlflow_uri or Secret.address(os.environ.get("MLFLOW_TRACKING_URI", ""))
