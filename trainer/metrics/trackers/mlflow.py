"""MLflow: a server (https://…), or a database such as sqlite:///…"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from common.errors import UserError
from trainer.metrics.trackers.base import TrackedRun
from trainer.metrics.trackers.options import TrackerOptions

#: The tag by which a run is found again, whichever process began it.
_TAG = "training"
#: In every record of a step; added after the step's other numbers, so that a step that has it is complete.
_LAST = "loss"
#: Most metrics and parameters in one request, most characters of a value (MLflow's REST API, "Request Limits").
_MOST_METRICS, _MOST_PARAMETERS, _MOST_CHARACTERS = 1000, 100, 6000
#: A server that does not answer is tried again by `trainer.metrics.sending`, not for minutes in each request; only
#: the server is to hear of the training.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


class MlflowTracker:
    """A run of the experiment that is named after the project."""

    def __init__(self, run: TrackedRun, options: TrackerOptions) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=options.mlflow_uri.reveal() if options.mlflow_uri else None)
        experiment = self._experiment(options.project)
        found = self._client.search_runs([experiment], f"tags.{_TAG} = '{run.id}'", max_results=1)
        made = found[0] if found else self._client.create_run(experiment, run_name=run.name, tags={_TAG: run.id})
        self._id = made.info.run_id
        if made.info.status != "RUNNING":
            self._client.update_run(self._id, status="RUNNING")
        self._describe(made.data.params, run.parameters)
        steps = [one.step for one in self._client.get_metric_history(self._id, _LAST)] if found else []
        self.last_step = max(steps, default=0)
        #: What is added but not yet handed over, step by step.
        self._added: list[Any] = []

    def _experiment(self, name: str) -> str:
        """The experiment's id. Two trainings may create it at the same time."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise UserError(
                f"MLflow's experiment {name} is deleted; restore it there, or give another name to the project"
            )
        return str(found.experiment_id)

    def _describe(self, known: Mapping[str, str], parameters: Mapping[str, Any]) -> None:
        """Set parameters; MLflow never changes one, so a value that has changed since becomes a tag."""
        from mlflow.entities import Param, RunTag

        texts = {name: str(value)[:_MOST_CHARACTERS] for name, value in parameters.items()}
        new = [Param(name, text) for name, text in texts.items() if name not in known]
        changed = [RunTag(name, text) for name, text in texts.items() if known.get(name, text) != text]
        for start in range(0, max(len(new), len(changed)), _MOST_PARAMETERS):
            part = slice(start, start + _MOST_PARAMETERS)
            self._client.log_batch(self._id, params=new[part], tags=changed[part])

    def add(self, step: int, scalars: Mapping[str, float], at: float) -> None:
        if len(self._added) + len(scalars) > _MOST_METRICS:
            self.flush()
        names = sorted(scalars, key=lambda name: name == _LAST)
        # With the record's own time: a database then takes the same metric, sent twice, as one.
        self._added += [self._metric(name, scalars[name], round(1000 * at), step) for name in names]

    def flush(self) -> None:
        if self._added:
            self._client.log_batch(self._id, metrics=self._added)
            self.last_step = self._added[-1].step
            self._added.clear()

    def summarise(self, results: Mapping[str, float]) -> None:
        known = self._client.get_run(self._id).data.metrics
        now = round(1000 * time.time())
        new = [self._metric(k, value, now, self.last_step) for k, value in results.items() if known.get(k) != value]
        if new:
            self._client.log_batch(self._id, metrics=new)

    def close(self, *, is_whole: bool = False) -> None:
        self.flush()
        self._client.set_terminated(self._id, "FINISHED" if is_whole else "KILLED")
