"""A folder into a repository of the Hugging Face hub, in one commit."""

from pathlib import Path
from typing import Any

from stages.errors import InfrastructureError, UsageError
from stages.redaction import redacted, secret_in

REFUSED = (401, 403)


def token(variable: str) -> str:
    """The token from the environment, redacted from now on; `UsageError` names a variable that is missing or empty."""
    value = secret_in(variable)
    if not value:
        raise UsageError(
            f"The environment variable {variable}, which holds the hub's token, is not set. Export it, name another "
            "with api_key_env, or leave repo out: then the folder is written and nothing is sent."
        )
    return value


def push(folder: Path, repo: str, repo_type: str, *, endpoint: str, secret: str, private: bool) -> dict[str, Any]:
    """Create the repository where there is none, commit the folder; returns the commit's address and digest.

    Raises `UsageError` where the hub refuses the token or the name, `InfrastructureError` where it cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.errors import HTTPError as Unreachable  # type: ignore[attr-defined]  # of its HTTP client

    api = HfApi(endpoint=endpoint, token=secret, library_name="composer")
    try:
        api.create_repo(repo, repo_type=repo_type, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo, repo_type=repo_type, folder_path=folder, commit_message="Publish a run of Composer"
        )
    except HFValidationError as error:
        raise UsageError(f"repo={repo} is no name for a repository: {error}") from None
    except HfHubHTTPError as error:
        said = redacted(str(error.server_message or error).strip().split("\n")[0])
        if error.response.status_code in REFUSED:
            raise UsageError(f"{endpoint} refuses the token for {repo}: {said}") from None
        raise InfrastructureError(f"{endpoint} answered {error.response.status_code} for {repo}: {said}") from None
    except (Unreachable, OSError, RuntimeError, ValueError) as error:
        said = redacted(str(error).strip().split("\n")[0])
        raise InfrastructureError(f"{repo} could not be sent to {endpoint}: {said}") from None
    return {"commit": str(done.commit_url), "oid": done.oid}
