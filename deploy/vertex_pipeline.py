"""The refresh of docs/production.md as a Vertex AI pipeline: `python deploy/vertex_pipeline.py
refresh.json` compiles it.

Needs kfp 2.17 (`pip install --group vertex`, pip 25.1 or newer) in its own environment: it pins old
requests, urllib3 and protobuf. Then, with
google-cloud-aiplatform:

    PipelineJob(display_name="refresh", template_path="refresh.json", parameter_values={
        "run_file": "/gcs/BUCKET/refresh.yaml", "target": "smollm2",
        "privacy_key": "projects/PROJECT/secrets/eyas-privacy-key/versions/latest"}).submit()

Run file and logs are paths below /gcs/BUCKET, where Vertex mounts the buckets. The privacy key is a
secret of Secret Manager, which the job's service account may read. A head that is not better ends
the task with exit code 3; its evaluation is stored all the same. A better one is laid out as
AIP_STORAGE_URI is read: the output `endpoint` is the artifact of a model with the image for serving
(EXTRAS=gcs).
"""

import sys

from kfp import compiler, dsl

IMAGE = "eyas:train"  # built with EXTRAS=gcs,train; with the registry that Vertex pulls from

# A run works on a local disk and resumes there; what it made goes into the pipeline's bucket.
REFRESH = """
EYAS_PRIVACY_KEY="$(python -c '
import base64, sys, google.auth
from google.auth.transport.requests import AuthorizedSession
session = AuthorizedSession(google.auth.default()[0])
found = session.get("https://secretmanager.googleapis.com/v1/" + sys.argv[1] + ":access")
found.raise_for_status()
print(base64.b64decode(found.json()["payload"]["data"]).decode())' "$1")" || exit 2
export EYAS_PRIVACY_KEY
eyas run "$0" --set output=/tmp/refresh
code=$?
mkdir -p "$(dirname "$2")" "$3"
cp /tmp/refresh/eval-*/eval.json "$2"
test $code -eq 0 && cp -r /tmp/refresh/export-*/. "$3"
exit $code
"""
LAY_OUT = """
set -e
mkdir -p "$2"
cp -rL "$(python -c '
import sys
from eyas.gguf.checkpoint import whole_folder
from eyas.hub import resolve_target
print(whole_folder(resolve_target(sys.argv[1])))' "$1")" "$2/target"
rm -f "$2/target/source.gguf"
cp -r "$0/sglang" "$2/head"
cp "$0/eval.json" "$2/head"
"""


def shell(script: str, *args: object) -> dsl.ContainerSpec:
    """A container that runs a script; its arguments are $0, $1, ..."""
    return dsl.ContainerSpec(image=IMAGE, command=["sh", "-c", script], args=list(args))


@dsl.container_component
def refresh(
    run_file: str,
    privacy_key: str,
    evaluation: dsl.Output[dsl.Artifact],
    head: dsl.Output[dsl.Model],
) -> dsl.ContainerSpec:
    return shell(REFRESH, run_file, privacy_key, evaluation.path, head.path)


@dsl.container_component
def lay_out(
    head: dsl.Input[dsl.Model], target: str, endpoint: dsl.Output[dsl.Model]
) -> dsl.ContainerSpec:
    return shell(LAY_OUT, head.path, target, endpoint.path)


@dsl.pipeline(name="eyas-refresh", description="from logs to the next head, if it is better")
def pipeline(
    run_file: str = "/gcs/BUCKET/refresh.yaml",
    target: str = "smollm2",
    privacy_key: str = "projects/PROJECT/secrets/eyas-privacy-key/versions/latest",
) -> None:
    task = refresh(run_file=run_file, privacy_key=privacy_key)
    task.set_cpu_limit("8").set_memory_limit("16G")
    # the logs change, the name of the run file does not
    task.set_caching_options(False)
    lay_out(head=task.outputs["head"], target=target)


if __name__ == "__main__":
    compiler.Compiler().compile(pipeline, sys.argv[1])
