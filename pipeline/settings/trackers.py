"""The section on where training metrics are shown: [trackers]."""

from __future__ import annotations

import luigi

from common.errors import UserError
from pipeline.settings.cluster import Cluster
from pipeline.settings.parameters import Address, in_section, setting
from trainer.metrics.trackers.options import TrackerOptions


class Trackers(luigi.Config):
    names = luigi.StrParameter()
    project = luigi.StrParameter()
    mlflow_uri = Address()
    wandb_mode: str = setting(TrackerOptions, "wandb_mode")
    wait_s: float = setting(TrackerOptions, "wait_s")

    @property
    def options(self) -> TrackerOptions:
        """As the trainer takes them. Raises `UserError`."""
        with in_section("trackers"):
            return TrackerOptions(**{**self.param_kwargs, "mlflow_uri": self.mlflow_uri or None})

    def check(self, cluster: Cluster) -> None:
        """Raise `UserError` unless the settings agree, and the libraries are there where training runs here."""
        options, most_s = self.options, min(cluster.hang_timeout_s, cluster.collective_timeout_s)
        if options.remote and self.wait_s >= most_s:
            raise UserError(
                f"[trackers] wait_s = {self.wait_s:g} is no less than [cluster] hang_timeout_s or "
                f"collective_timeout_s, after which a training that waits counts as dead; allowed: below {most_s:g}"
            )
        if cluster.launcher == "local":
            with in_section("trackers"):
                options.require_installed()
        elif options.mlflow_uri and options.mlflow_uri.hides:
            raise UserError(
                f"[trackers] mlflow_uri = {self.mlflow_uri} has a login, which a job's record must not hold; set "
                f"MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where the job runs"
            )
