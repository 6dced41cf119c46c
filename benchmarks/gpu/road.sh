# The road of docs/gpu.md by its commands at small scale, each stage timed: OUT/road.jsonl has seconds and tokens/s. A second
# call goes on behind the recorded stages; one that was cut has `resumed`, and the rest's seconds.
#   [ENGINE_PYTHON=FILE] [MORE=FLAGS of SGLang] [PROMPTS=2000 TOKENS=256 EPOCHS=2] bash benchmarks/gpu/road.sh OUT MODEL [sglang | eyas]
set -e
out=${1:?a folder} model=${2:?a model} engine=${3:-sglang} port=8731
python=${PYTHON:-python3} server=
eyas() { $python -m eyas.cli.main "$@"; }
serve() {  # plain, or with a head; waits until it answers
    if [ "$engine" = eyas ]; then set -- serve --target "$model" --port $port ${1:+--head "$1"}
    else set -- serve --engine "$engine" ${ENGINE_PYTHON:+--engine-python "$ENGINE_PYTHON"} --target "$model" --port $port ${1:+--head "$1"} --engine-args "$MORE"; fi
    $python -m eyas.cli.main "$@" > "$out/server.log" 2>&1 &
    server=$!
    trap 'kill $server' EXIT
    until curl -sf "http://127.0.0.1:$port/health" > /dev/null; do kill -0 $server; sleep 1; done
}
stop() { [ -z "$server" ] || { trap - EXIT; kill $server; wait $server || true; server=; }; }
recorded() { grep -qs "\"stage\": \"$1\"" "$out/road.jsonl"; }
stage() {  # NAME FOLDER COMMAND...
    name=$1 made=$2; shift 2
    if recorded "$name"; then return; fi
    resumed=$([ -e "$made" ] && echo yes || true)
    begun=$(date +%s.%N)
    "$@"
    $python - "$name" "$made" "$begun" "$resumed" >> "$out/road.jsonl" <<'END'
import json, sys, time
from eyas.artifact import Artifact
name, made, begun, resumed = sys.argv[1:]
seconds = time.time() - float(begun)
counts = Artifact(made).manifest(name).counts if made else {}
tokens = counts.get("answer_tokens", counts.get("tokens"))
print(json.dumps({"stage": name, "seconds": seconds, "tokens_per_s": tokens and tokens / seconds, "counts": counts, "resumed": bool(resumed)}))
END
    tail -1 "$out/road.jsonl"
}
mkdir -p "$out"
cat > "$out/run.yaml" <<END
prompts:
  sources: [{path: $($python -c 'from eyas.builtin import demo_prompts; print(demo_prompts())'), max_prompts: ${PROMPTS:-2000}}]
generate: {max_tokens: ${TOKENS:-256}}
capture: {held_out_share: 0.05}
train: {epochs: ${EPOCHS:-2}}
END
stage prompts "$out/prompts" eyas prompts -c "$out/run.yaml" -o "$out/prompts"
if ! recorded generate; then serve; fi
stage generate "$out/answers" eyas generate "$out/prompts" -t "$model" -o "$out/answers" -c "$out/run.yaml" --server http://127.0.0.1:$port/v1
stop
stage capture "$out/features" eyas capture "$out/answers" -t "$model" -o "$out/features" -c "$out/run.yaml"
stage train "$out/head" eyas train "$out/features" -t "$model" -o "$out/head" -c "$out/run.yaml"
stage eval "$out/eval" eyas eval "$out/head" -t "$model" -o "$out/eval" --features "$out/features"
stage export "$out/export" eyas export "$out/head" -t "$model" -o "$out/export" --evaluation "$out/eval"
if ! recorded bench; then serve "$out/export/sglang"; fi
stage bench "$out/bench" eyas bench http://127.0.0.1:$port -o "$out/bench" --concurrency 1,4
stop
