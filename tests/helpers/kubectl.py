"""A stand-in for kubectl and the cluster behind it: pods are processes of this machine, and the Job controller is a
process that starts them, replaces the killed ones and obeys the Job's podFailurePolicy. Understands what the launcher
says, and nothing else. KUBECTL_STATE is its directory.

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

import kubernetes_validate
import yaml

STATE = Path(os.environ["KUBECTL_STATE"])


def apply(text: str) -> int:
    for document in yaml.safe_load_all(text):
        kubernetes_validate.validate(document, "1.31", strict=True)
        (STATE / f"{document['kind'].lower()}.json").write_text(json.dumps(document))
    subprocess.Popen([sys.executable, __file__, "controller"], start_new_session=True, stdin=subprocess.DEVNULL,
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    return 0


def controller() -> int:
    job = json.loads((STATE / "job.json").read_text())
    spec = job["spec"]
    rules = {r["action"]: r for r in spec["podFailurePolicy"]["rules"]}
    stuck = (STATE / "pods.json").exists()  # what `get pods` says of pods that never run
    pods = {} if stuck else {index: start_pod(job, index) for index in range(spec["completions"])}
    signal.signal(signal.SIGTERM, lambda *_: (STATE / "deleted").touch())
    note(controller=os.getpid(), ready=len(pods))
    while pods or stuck:
        time.sleep(0.1)
        if (STATE / "deleted").exists():
            for pod in pods.values():
                pod.terminate()
            for pod in pods.values():
                pod.wait()
            (STATE / "job.json").unlink()
            return 0
        for index, pod in list(pods.items()):
            status = pod.poll()
            if status == 0:
                del pods[index]
            elif status in rules["FailJob"]["onExitCodes"]["values"]:
                for other in pods.values():
                    other.terminate()
                    other.wait()
                return note(conditions=[{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}])
            elif status is not None:
                pods[index] = start_pod(job, index)
    return note(conditions=[{"type": "Complete", "status": "True"}])


def start_pod(job: dict[str, Any], index: int) -> subprocess.Popen[bytes]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environment = {**os.environ, "POD": f"{job['metadata']['name']}-{index}"}
    for variable in container["env"]:
        environment[variable["name"]] = variable.get("value", str(index))
    assert environment["PET_MASTER_ADDR"] == f"{job['metadata']['name']}-0.{job['metadata']['name']}"
    environment["PET_MASTER_ADDR"] = "127.0.0.1"
    with (STATE / f"pod-{index}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, *container["command"][1:]], cwd=container["workingDir"],
                                env=environment, stdout=log, stderr=log)  # fmt: skip


def note(**values: object) -> int:
    path = STATE / "status.json"
    status = json.loads(path.read_text()) if path.exists() else {}
    path.with_suffix(".tmp").write_text(json.dumps({**status, **values}))
    path.with_suffix(".tmp").replace(path)
    return 0


def main(words: list[str]) -> int:
    words = [word for word in words if not word.startswith("--")]
    if words[0] == "controller":
        return controller()
    if words[0] == "apply":
        return apply(sys.stdin.read())
    verb, kind = words[:2]
    path = STATE / f"{kind}.json"
    if verb == "delete":
        if kind == "service":
            path.unlink(missing_ok=True)
        elif path.exists():
            os.kill(json.loads((STATE / "status.json").read_text())["controller"], signal.SIGTERM)
        return 0
    if kind == "pods":
        stuck = STATE / "pods.json"
        print(stuck.read_text() if stuck.exists() else json.dumps({"items": []}))
        return 0
    if not path.exists():
        print(f'Error from server (NotFound): jobs.batch "{words[2]}" not found', file=sys.stderr)
        return 1
    status = json.loads((STATE / "status.json").read_text()) if (STATE / "status.json").exists() else {}
    print(json.dumps({**json.loads(path.read_text()), "status": status}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
