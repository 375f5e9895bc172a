"""A stand-in for kubectl and the cluster behind it: pods are processes of this machine, and the Job controller is a
process that starts them, replaces the killed ones and obeys the Job's podFailurePolicy. Understands the launcher's
commands, and nothing else. KUBECTL_STATE is its directory.

A JobSet becomes a Job as its controller makes one. A suspended object waits until the file `admitted` exists, as if
Kueue had quota for it, and is suspended again when that file is gone. Kinds listed in `refused` are not accepted, those
in `absent` are not installed, those in `forbidden` cannot be listed.

No name service: pod 0 is found at 127.0.0.1.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

STATE = Path(os.environ["KUBECTL_STATE"])
#: What the launcher submits and waits for.
SUBMITTED = ("jobset", "job")


def plain(kind: str) -> str:
    """`podgroup` of `podgroups.scheduling.volcano.sh`."""
    return kind.partition(".")[0].removesuffix("s")


def apply(text: str) -> int:
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.helpers.kubernetes import crds

    documents = list(yaml.safe_load_all(text))
    for document in documents:
        crds.validate(document, "1.31")
    refused = listed("refused")
    for document in documents:
        if document["kind"] not in refused:  # kubectl goes on with the other objects
            document["metadata"]["uid"] = "uid-1"
            (STATE / f"{document['kind'].lower()}.json").write_text(json.dumps(document))
    if refused:
        print(f'error: no matches for kind "{refused[0]}"', file=sys.stderr)
        return 1
    subprocess.Popen([sys.executable, __file__, "controller"], start_new_session=True, stdin=subprocess.DEVNULL,
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    return 0


def listed(name: str) -> list[str]:
    return (STATE / name).read_text().split() if (STATE / name).exists() else []


def submitted() -> Path:
    return next(path for kind in SUBMITTED if (path := STATE / f"{kind}.json").exists())


def job_of(document: dict[str, Any]) -> dict[str, Any]:
    """The Job itself, or the one that a JobSet's controller makes from it."""
    if document["kind"] == "Job":
        return document
    (replicated,) = document["spec"]["replicatedJobs"]
    name = f"{document['metadata']['name']}-{replicated['name']}-0"
    return {"metadata": {**document["metadata"], "name": name}, **replicated["template"]}


def controller() -> int:
    """What the Job controller does, and for a suspended object what Kueue does."""
    path = submitted()
    document = json.loads(path.read_text())
    queued, complete = document["spec"].get("suspend", False), "Completed" if path.stem == "jobset" else "Complete"
    job = job_of(document)
    rules = {r["action"]: r for r in job["spec"]["podFailurePolicy"]["rules"]}
    stuck = (STATE / "pods.json").exists()  # what `get pods` says of pods that never run
    pods: dict[int, subprocess.Popen[bytes]] = {}
    left = set() if stuck else set(range(job["spec"]["completions"]))
    signal.signal(signal.SIGTERM, lambda *_: (STATE / "deleted").touch())
    note(controller=os.getpid(), pods=0)
    while left or stuck:
        time.sleep(0.1)
        if (STATE / "deleted").exists() or not path.exists():  # or the test is over
            end(pods)
            path.unlink(missing_ok=True)
            return 0
        suspended = queued and not (STATE / "admitted").exists()
        if suspended != document["spec"].get("suspend", False):
            document["spec"]["suspend"] = suspended
            path.write_text(json.dumps(document))
            if suspended:
                end(pods)
        if suspended:
            continue
        for index in sorted(left):
            status = pods[index].poll() if index in pods else -1
            if status == 0:
                left.discard(index)
            elif status in rules["FailJob"]["onExitCodes"]["values"]:
                end(pods)
                return note(conditions=[{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}])
            elif status is not None:
                pods[index] = start_pod(job, index)
        note(pods=len(pods))
    return note(conditions=[{"type": complete, "status": "True"}])


def end(pods: dict[int, subprocess.Popen[bytes]]) -> None:
    for pod in pods.values():
        pod.terminate()
    for pod in pods.values():
        pod.wait()
    pods.clear()
    if STATE.exists():
        note(pods=0)


def start_pod(job: dict[str, Any], index: int) -> subprocess.Popen[bytes]:
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    environment = {**os.environ, "POD": f"{job['metadata']['name']}-{index}"}
    for variable in container["env"]:
        environment[variable["name"]] = variable.get("value", str(index))
    assert environment["PET_MASTER_ADDR"] == f"{job['metadata']['name']}-0.{spec['subdomain']}"
    environment["PET_MASTER_ADDR"] = "127.0.0.1"
    with (STATE / f"pod-{index}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, *container["command"][1:]], cwd=container["workingDir"],
                                env=environment, stdout=log, stderr=log)  # fmt: skip


def note(**values: object) -> int:
    path = STATE / "status.json"
    path.with_suffix(".tmp").write_text(json.dumps({**status(), **values}))
    path.with_suffix(".tmp").replace(path)
    return 0


def status() -> dict[str, Any]:
    path = STATE / "status.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def delete(kind: str) -> int:
    path = STATE / f"{kind}.json"
    if path.exists() and kind in SUBMITTED and "controller" in status():
        os.kill(status()["controller"], signal.SIGTERM)
    else:
        path.unlink(missing_ok=True)
    return 0


def get_list(kind: str, selector: str) -> int:
    """`get pods` and `get workloads`, for the one object there is."""
    path = STATE / f"{kind}s.json"
    if kind == "pod":
        owner = f"batch.kubernetes.io/job-name={job_of(json.loads(submitted().read_text()))['metadata']['name']}"
        ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        found = [ready] * status().get("pods", 0)
    else:
        owner, found = "kueue.x-k8s.io/job-uid=uid-1", []
    if path.exists():
        found = json.loads(path.read_text())["items"]
    print(json.dumps({"items": found if selector == owner else []}))
    return 0


def main(words: list[str]) -> int:
    selector = next((word.removeprefix("--selector=") for word in words if word.startswith("--selector=")), "")
    words = [word for word in words if not word.startswith("--")]
    if words[0] == "controller":
        return controller()
    if words[0] == "apply":
        return apply(sys.stdin.read())
    if words[:2] == ["delete", "-f"]:
        for document in yaml.safe_load_all(sys.stdin.read()):
            delete(document["kind"].lower())
        return 0
    verb, kind = words[0], plain(words[1])
    if verb == "delete":
        return delete(kind)
    if selector and kind in listed("forbidden"):
        print(f"Error from server (Forbidden): you cannot list {words[1]}", file=sys.stderr)
        return 1
    if selector:
        return get_list(kind, selector)
    path = STATE / f"{kind}.json"
    if not path.exists():
        missing = f'Error from server (NotFound): {words[1]} "{words[2]}" not found'
        text = f'the server doesn\'t have a resource type "{kind}s"' if kind in listed("absent") else missing
        print(text, file=sys.stderr)
        return 1
    found = json.loads(path.read_text())
    print(json.dumps({**found, "status": status()} if kind in SUBMITTED else found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
