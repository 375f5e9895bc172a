"""Locks and hashes are tested through the stages and the trainer that rely on them."""

from __future__ import annotations

from tests.stages.conftest import folder as folder
from tests.trainer.conftest import data as data
from tests.trainer.conftest import model as model
