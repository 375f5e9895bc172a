"""The MLP chain of the Neuron tutorial: fetch MNIST, train, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.tasks import summary
from pipeline.tasks.goal import Goal
from pipeline.tasks.stage import Stage
from pipeline.tasks.training import EvaluationStage, Training
from stages.evaluate_mlp import EvaluateMlpOptions
from stages.mnist import MnistOptions


class DownloadMnist(Stage):
    """The four files of MNIST, checked."""

    stored_as = "shards"

    def options(self) -> MnistOptions:
        mnist, transport = self.settings.mnist, self.settings.dataset.transport
        return MnistOptions(url=mnist.url, checksums=mnist.checksums, **transport)


class TrainMlp(Training):
    """Trains the tutorial's MLP."""

    format_version = 2  # 2: initial weights and sample order from independent streams

    def requires(self) -> dict[str, Stage]:
        return {"download_mnist": self.sibling(DownloadMnist)}

    def parameters(self) -> dict[str, Any]:
        """Parameters that identify the training; batch size and learning rate scale with the number of workers."""
        mnist, workers = self.settings.mnist, self.settings.cluster.workers
        return {
            "epochs": mnist.epochs,
            "global_batch_size": mnist.batch_size * workers,
            "lr": mnist.lr * workers,
            "precision": mnist.precision,
            "seed": self.settings.run.seed,
        }

    @property
    def max_steps(self) -> int | None:
        download = self.requires()["download_mnist"]
        if not download.complete():
            return None
        images = int(download.counts()["training_images"])
        steps: int = self.settings.mnist.epochs * (images // self.parameters()["global_batch_size"])
        return steps

    def command(self) -> list[str]:
        mnist = self.settings.mnist
        return self.launched(
            mnist,
            workload="mnist",
            data_dir=self.requires()["download_mnist"].directory,
            output_dir=self.directory,
            epochs=mnist.epochs,
            micro_batch_size=mnist.batch_size,
            # The MLP is not split, and a step of it is one micro-step.
            tensor_parallel_size=None,
            batches_per_execution=None,
            resume=True,
        )


class EvaluateMlp(EvaluationStage):
    """The accuracy of the saved model on the held-out images."""

    on_cluster = imports_torch = True

    def requires(self) -> dict[str, Stage]:
        return {"train_mlp": self.sibling(TrainMlp), "download_mnist": self.sibling(DownloadMnist)}

    def options(self) -> EvaluateMlpOptions:
        return EvaluateMlpOptions(
            checkpoint=self.sibling(TrainMlp).directory,
            data=self.sibling(DownloadMnist).directory,
            batch_size=self.settings.mnist.batch_size,
            device=self.settings.cluster.device,
        )


class MnistMlp(Goal):
    """The whole MLP tutorial."""

    def requires(self) -> dict[str, Stage]:
        return {"train_mlp": self.sibling(TrainMlp), "evaluate_mlp": self.sibling(EvaluateMlp)}

    def print_summary(self) -> None:
        training = self.sibling(TrainMlp)
        checkpoint: Path = training.directory / training.counts()["checkpoint"]
        summary.print_mlp(training.counts(), self.sibling(EvaluateMlp).counts(), checkpoint)
