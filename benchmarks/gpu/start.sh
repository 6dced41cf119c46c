# On the GPU machine, beside what benchmarks/gpu/payload.py made:
#   G=FOLDER bash start.sh keep                   copies the parts that are here to G, which stays
#   G=FOLDER bash start.sh SCRIPT [ARGUMENTS]     unpacks them once all are there, and runs a script
set -e
FLAGS="--attention-backend triton --sampling-backend pytorch --grammar-backend none --disable-flashinfer-autotune"
: "${G:?a folder for what is unpacked}"
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$G"
for one in "$here"/part-* "$here"/parts; do [ -f "$one" ] && cp "$one" "$G"; done
[ "$1" = keep ] && { ls -l "$G"; exit; }
if [ ! -f "$G/unpacked" ]; then
    found=$(ls "$G" | grep -c '^part-')
    [ "$found" = "$(cat "$G/parts")" ] || { echo "error: $found of $(cat "$G/parts") parts are in $G"; exit 2; }
    cat "$G"/part-* | tar -x -C "$G"
    tar -xJf "$G/code.tar.xz" -C "$G"
    touch "$G/unpacked"
fi
export PYTHONPATH="$G/site:$G/eyas" TVM_FFI_CACHE_DIR="$G/tvm" SGLANG_IS_FLASHINFER_AVAILABLE=false
export SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false SGLANG_DISABLE_TELEMETRY=1 PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=4
export TORCHINDUCTOR_CACHE_DIR="$G/inductor" TRITON_CACHE_DIR="$G/triton"
script="$G/eyas/$1"
shift
case $script in
    */serve.py) exec python3 "$script" --engine-args "$FLAGS" "$@" ;;
    *) exec python3 "$script" "$@" ;;
esac
