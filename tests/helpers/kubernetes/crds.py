"""Checks objects against Kubernetes' schemas, and those of operators against the fields in their published types.

These are JobSet v1alpha2 (kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go) and Volcano's PodGroup v1beta1
(volcano-sh/volcano, config/crd/volcano/bases). Written by hand: fields that nothing here sets are left out, so unknown
fields are refused, and some known ones too.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**found, "required": list(required)}


_TEXT, _FLAG, _COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
_NAMES = {"type": "object", "additionalProperties": _TEXT}
_METADATA = _object(("name", "namespace"), name=_TEXT, namespace=_TEXT, labels=_NAMES, annotations=_NAMES)
_JOBSET = _object(
    replicatedJobs={
        "type": "array",
        # The Job inside is checked by Kubernetes' own schema.
        "items": _object(
            ("name", "template"), name=_TEXT, groupName=_TEXT, replicas=_COUNT, template={"type": "object"}
        ),
    },
    network=_object(enableDNSHostnames=_FLAG, subdomain=_TEXT, publishNotReadyAddresses=_FLAG),
    failurePolicy=_object(
        maxRestarts=_COUNT, restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]}
    ),
    successPolicy=_object(("operator",), operator={"enum": ["All", "Any"]}),
    suspend=_FLAG,
    ttlSecondsAfterFinished=_COUNT,
)
_POD_GROUP = _object(
    minMember=_COUNT, minResources=_NAMES, queue=_TEXT, priorityClassName=_TEXT, minTaskMember={"type": "object"}
)
_SPECS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): _JOBSET,
    ("scheduling.volcano.sh/v1beta1", "PodGroup"): _POD_GROUP,
}


def validate(document: dict[str, Any], version: str) -> None:
    """Check one object for Kubernetes `version`. Raises `jsonschema.ValidationError` or that of kubernetes_validate."""
    spec = _SPECS.get((document["apiVersion"], document["kind"]))
    if spec is None:
        kubernetes_validate.validate(document, version, strict=True)
        return
    schema = _object(
        ("apiVersion", "kind", "metadata", "spec"), apiVersion=_TEXT, kind=_TEXT, metadata=_METADATA, spec=spec
    )
    jsonschema.validate(document, schema)
    for replicated in document["spec"].get("replicatedJobs", []):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **replicated["template"]}
        kubernetes_validate.validate(job, version, strict=True)
