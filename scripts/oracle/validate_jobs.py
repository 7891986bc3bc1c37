"""Validates jobs with a JSON Schema: validate_jobs.py SCHEMA JOBS, where JOBS is a JSON list of jobs.

Prints a JSON list with the errors of each job, as pairs of the path of the value and the kind of
the mistake.
"""
import json
import sys

from jsonschema import Draft202012Validator

TYPES = {"string": str, "object": dict, "array": list, "boolean": bool}


def leaves(error):
    """Yields the errors that explain an error: for `anyOf`, those of the branch whose type fits."""
    if error.validator != "anyOf" or not error.context:
        yield error
        return
    branches = {}
    for inner in error.context:
        branches.setdefault(inner.schema_path[0], []).append(inner)
    at_value = error.absolute_path
    fitting = [
        inner
        for inner in branches.values()
        if not any(e.validator in ("type", "enum") and e.absolute_path == at_value for e in inner)
    ]
    if len(fitting) == 1 and not any(e.validator == "required" for e in fitting[0]):
        for inner in fitting[0]:
            yield from leaves(inner)
    else:
        yield error


def describe(error):
    """Yields the path and the kind of each mistake of an error."""
    path = ".".join(str(part) for part in error.absolute_path)
    below = path + "." if path else ""
    if error.validator == "additionalProperties":
        names = set(error.instance) - set(error.schema["properties"])
        yield from ([below + name, "unknown key"] for name in sorted(names))
    elif error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        yield from ([below + name, "missing"] for name in missing)
    elif error.validator == "anyOf" and all("required" in branch for branch in error.validator_value):
        yield [path, "missing"]
    elif error.validator == "oneOf":
        yield [path, "missing" if error.context else "conflict"]
    elif error.validator is None:
        yield [path, "conflict"]
    else:
        yield [path, "wrong value"]


schema, jobs = (json.load(open(path)) for path in sys.argv[1:3])
Draft202012Validator.check_schema(schema)
validator = Draft202012Validator(schema)
print(
    json.dumps(
        [
            sorted({tuple(found) for error in validator.iter_errors(job) for leaf in leaves(error) for found in describe(leaf)})
            for job in jobs
        ]
    )
)
