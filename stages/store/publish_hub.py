"""Publish a model as a repository of the Hugging Face Hub, with `huggingface_hub`, in one commit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from json import JSONDecodeError

from common.errors import UserError, one_line
from common.secrets import Secret
from stages.store.backend import Report
from stages.store.publish import Publication


class HubRepository:
    """`hf://org/name`. The token is the one that `huggingface_hub` finds; it is neither kept nor shown."""

    shows_progress = True

    def __init__(self, address: Secret, *, private: bool) -> None:
        """Raises `UserError` for a name that the Hub does not allow."""
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented there

        self.address, self._private = str(address), private
        self.path = address.reveal().removeprefix("hf://").rstrip("/")
        try:
            validate_repo_id(self.path)
            is_allowed = self.path.count("/") == 1
        except HFValidationError:
            is_allowed = False
        if not is_allowed:
            raise UserError(
                f"{address} is not a name on the Hub; write hf://org/name, of letters, digits, '-', '_' and '.', 96 at "
                f"most, without '--' and '..', not beginning or ending with '-' or '.', nor ending with .git"
            )

    def check(self, publication: Publication) -> None:
        from huggingface_hub import get_token

        if not get_token():
            raise UserError(
                f"{self.address}: no token for the Hub is known here; run `hf auth login`, or set HF_TOKEN, with a "
                f"token that may write to {self.path.partition('/')[0]}"
            )

    def publish(self, publication: Publication, report: Report) -> None:
        """The Hub checks the card first. The commit comes last and has everything, so the repository never holds half a
        model. What an interrupted run has uploaded is not sent again. `huggingface_hub` shows its own progress."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
        from huggingface_hub.constants import REPOCARD_NAME

        api = HfApi()
        with self._errors(api.endpoint):
            ModelCard(publication.files[REPOCARD_NAME].read_text(encoding="utf-8")).validate()
            # None: the organization's default.
            api.create_repo(self.path, private=self._private or None, exist_ok=True)
            if self._private and not api.model_info(self.path).private:
                raise UserError(
                    f"{self.address} is there already and public, and --private is for a new one; make it private in "
                    f"its settings on the Hub, publish under another name, or leave --private out"
                )
            superseded = publication.superseded(api.list_repo_files(self.path))
            added = [CommitOperationAdd(name, str(path)) for name, path in sorted(publication.files.items())]
            removed = [CommitOperationDelete(name) for name in superseded]
            api.create_commit(self.path, [*added, *removed], commit_message="Publish the model")

    @contextlib.contextmanager
    def _errors(self, endpoint: str) -> Iterator[None]:
        """Translate the library's errors to a `UserError` that says what to check."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except Exception as error:
            # The bases include that of all errors of the HTTP library, which differs between versions.
            if not isinstance(error, (*HfHubHTTPError.__bases__, OSError, RuntimeError, ValueError)):
                raise
            raise self._refusal(error, endpoint) from error

    def _refusal(self, error: Exception, endpoint: str) -> UserError:
        from huggingface_hub.errors import HfHubHTTPError

        is_no_answer = isinstance(error, HfHubHTTPError | JSONDecodeError)
        if isinstance(error, ValueError) and not is_no_answer:  # the card's metadata
            return UserError(
                f"{self.address}: the Hub does not accept the model card: {one_line(error)}; correct [card], or the "
                f"card beside the model, and run the same again"
            )
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, HfHubHTTPError):
            cause = cause.__cause__
        owner = self.path.partition("/")[0]
        if cause is not None:
            status, said = cause.response.status_code, one_line(cause)
            if status == 401:
                return UserError(
                    f"{self.address}: {endpoint} does not accept the token (HTTP 401); renew it with `hf auth login`, "
                    f"or set HF_TOKEN to one that may write to {owner}"
                )
            if status == 403:
                return UserError(
                    f"{self.address}: the token may not write there (HTTP 403); use one with write permission for "
                    f"{owner}"
                )
            return UserError(f"{self.address}: {endpoint} answered HTTP {status}: {said}; run the same again later")
        return UserError(
            f"{self.address}: the connection to {endpoint} failed ({one_line(error)}); check this machine's network "
            f"and HF_ENDPOINT, then run the same again"
        )
