"""Validates Kubernetes objects with the schemas of Kubernetes and of JobSet.

    validate_manifests.py OBJECTS VERSION…

OBJECTS is a file with a JSON list. Each object is validated strictly, that is without unknown fields, for each
version of Kubernetes. Prints a JSON list of errors, which is empty if all objects are valid.
"""
import json
import sys

import kubernetes_validate
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet


def find_unknown_fields(given, known, path):
    """Yields the paths of the fields in `given` that are not in `known`, the same object as its model
    describes it."""
    if isinstance(given, dict):
        for name, value in given.items():
            below = f"{path}.{name}"
            if not isinstance(known, dict) or name not in known:
                yield below
            else:
                yield from find_unknown_fields(value, known[name], below)
    elif isinstance(given, list):
        for index, value in enumerate(given):
            yield from find_unknown_fields(value, known[index], f"{path}[{index}]")


def list_objects(item):
    """Yields the objects that Kubernetes has a schema for: the object itself, or the Jobs of a JobSet,
    whose own fields are checked here."""
    if item["kind"] != "JobSet":
        yield item
        return
    known = JobsetV1alpha2JobSet.from_dict(item).to_dict()
    unknown = list(find_unknown_fields(item, known, "JobSet"))
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(unknown)}")
    for replicated in item["spec"]["replicatedJobs"]:
        template = replicated["template"]
        metadata = template.get("metadata", {}) | {"name": replicated["name"]}
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": template["spec"]}


errors = []
for item in json.load(open(sys.argv[1])):
    try:
        for validated in list_objects(item):
            for version in sys.argv[2:]:
                kubernetes_validate.validate(validated, version, strict=True)
    except Exception as error:
        errors.append(f"{item['kind']}: {type(error).__name__}: {error}"[:500])
print(json.dumps(errors))
