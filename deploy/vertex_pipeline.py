"""The refresh of docs/production.md as a Vertex AI pipeline: `python deploy/vertex_pipeline.py
refresh.json` compiles it.

Needs kfp 2.17 (`pip install "eyas[vertex]"`), in an environment of its own: kfp pins versions of
requests, urllib3 and protobuf that other packages have left behind. Then, with
google-cloud-aiplatform:

    PipelineJob(display_name="refresh", template_path="refresh.json",
                parameter_values={"run_file": "/gcs/BUCKET/refresh.yaml"}).submit()

Run file and logs are paths below /gcs/BUCKET, where Vertex mounts the buckets. A head that is not
better ends the task with exit code 3; its evaluation is stored all the same.
"""

import sys

from kfp import compiler, dsl

IMAGE = "eyas:train"  # built with EXTRAS=gcs,train; with the registry that Vertex pulls from

# A run works on a local disk and resumes there; what it made goes into the pipeline's bucket.
SCRIPT = """
eyas run "$0" --set output=/tmp/refresh
code=$?
mkdir -p "$(dirname "$1")" "$2"
cp /tmp/refresh/eval-*/eval.json "$1"
test $code -eq 0 && cp -r /tmp/refresh/export-*/. "$2"
exit $code
"""


@dsl.container_component
def refresh(
    run_file: str, evaluation: dsl.Output[dsl.Artifact], head: dsl.Output[dsl.Model]
) -> dsl.ContainerSpec:
    return dsl.ContainerSpec(
        image=IMAGE, command=["sh", "-c", SCRIPT], args=[run_file, evaluation.path, head.path]
    )


@dsl.pipeline(name="eyas-refresh", description="from logs to the next head, if it is better")
def pipeline(run_file: str = "/gcs/BUCKET/refresh.yaml") -> None:
    task = refresh(run_file=run_file)
    task.set_cpu_limit("8").set_memory_limit("16G")
    task.set_caching_options(False)  # the logs change, the name of the run file does not


if __name__ == "__main__":
    compiler.Compiler().compile(pipeline, sys.argv[1])
