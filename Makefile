# Everything happens in an environment of its own, $(VENV), and in build/. The serving stacks that the
# adapters are tested in have theirs in build/hosts: tests/hosts/hosts.mk. All that is installed has
# the version that constraints/ names, which was tested: `make update` writes them.

# One make works in a folder at a time: the next one waits. Those that it starts belong to it.
ifneq ($(and $(filter-out help,$(MAKECMDGOALS)),$(shell command -v flock),$(filter-out $(FASTDRAFT_LOCKED),$(CURDIR))),)
.PHONY: locked $(MAKECMDGOALS)
$(MAKECMDGOALS): locked
	@:
locked:
	@flock -n . true || echo "Another make works in this folder: waiting until it ends" >&2
	@FASTDRAFT_LOCKED=$(CURDIR) flock -o . $(MAKE) --no-print-directory $(MAKECMDGOALS)
else

PYTHON ?= python3
VENV ?= .venv
# PyTorch's default wheels for Linux carry gigabytes of CUDA libraries. A machine without an NVIDIA
# driver takes the CPU build: from what pip is configured to see, else from PyTorch's own index.
TORCH := $(shell sed -n 's/^torch==//p' constraints/main.txt)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The oldest transformers that the package allows.
TRANSFORMERS_OLDEST ?= 5.19.0
# What of the Python tests to run.
TESTS ?=
# Those whose results depend on how a processor rounds; counts of many samples do not.
NUMERICAL_TESTS := $(addprefix tests/verification/test_,filters.py oracle.py) \
  tests/hf/test_recurrent.py tests/drafters/test_assistant.py
# Those of what transformers prepares, calls and is called with, which differs by version.
OLDEST_TESTS := $(patsubst %,tests/hf/test_%.py,attention exact greedy images interface kv_cache \
  models pipeline refusals static)
# How many processes a test or lint step takes; each is held to one thread.
JOBS ?= 2
FUZZ_SECONDS ?= 60
MINUTES ?= 60
# Options of `fastdraft demo`.
DEMO ?=
# A folder of recorded requests, for the benchmarks that replay some: `make bench DATA=FOLDER`.
DATA ?=
# Options of bench/gpu.py; anything in GPU_REHEARSAL rehearses on the CPU.
GPU ?=
GPU_REHEARSAL ?=
# What a GPU machine without a network lacks: `make gpu-carry` fills the folder.
CARRY ?= .carry

export PATH := $(abspath $(VENV)/bin):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_CONSTRAINT := $(abspath constraints/main.txt)
# For what newer versions of pip install to build a package with.
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_ROOT_USER_ACTION := ignore
# It leaves compiling to the first import of a module: most of what is installed is never imported.
INSTALL := python $(CURDIR)/tools/uv.py pip install -q
unexport PYTHONDONTWRITEBYTECODE
say = @echo "::: $(1)"
# Ninja would share out the jobs of a make -j, whose pipes it does not get.
ALONE := env -u MAKEFLAGS

CORE_FILES := CMakeLists.txt $(shell find csrc cmake -type f)
PACKAGE_FILES := $(CORE_FILES) pyproject.toml \
  $(shell find python kernels -name '*.py' -o -name '*.pyi' -o -name py.typed)
CXX_FILES := $(shell find csrc tests/cpp bench/cpp examples/c examples/cpp -name '*.cc' -o -name '*.[ch]')
# One process needs no second one that hands it its tests.
PYTEST = OMP_NUM_THREADS=1 python -m pytest -n $(patsubst 1,0,$(JOBS)) --dist worksteal

include tests/hosts/hosts.mk

# What a fresh system lacks, and what for: installed where make may, else named. Another apt-get may run.
MAY_INSTALL := $(shell [ "$$(id -u)" != 0 ] || command -v apt-get)
APT_GET := DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300
install = $(if $(MAY_INSTALL),\
  { echo "Installing $(1) with apt-get: $(2)" && $(APT_GET) update \
    && $(APT_GET) install -y --no-install-recommends --no-upgrade $(1); },\
  { echo "Install what Debian and Ubuntu keep in $(1), then try again: $(2)" >&2; false; })
HAS_PYTHON_H := import os, sys, sysconfig; \
  sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all rest test-cpp test-tsan test-arm64 test-install test-python \
  test-slow test-kernels test-interpreted test-compiled test-oldest test-other-cpu test-newest update check lint format fuzz \
  campaign stubs wheel wheels package rehearsal bench plots bench-serving gpu gpu-carry docs docs-links clean \
  gtest browser

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: gtest browser ## Make the whole environment and build once
	@$(MAKE) --no-print-directory $(VENV)/.test-all $(VENV)/.lint

demo: $(VENV)/.package ## Decode real text with a real model: plain, prompt lookup, fastdraft
	fastdraft demo $(DEMO)

# C++ compiles while packages are fetched.
test: ## Run the quick tests: C++, kernels, Python, docs
	@$(MAKE) --no-print-directory -j 2 test-cpp $(VENV)/.test
	@$(MAKE) --no-print-directory test-kernels test-python

# What `make test` leaves out, the longest first: .ci/run takes three at a time.
REST := test-slow test-vllm test-compiled test-tsan test-oldest test-interpreted test-install \
  test-llama-cpp test-sglang test-other-cpu $(filter-out %-vllm %-llama-cpp %-sglang,$(HOSTS:%=test-%))
test-all: test ## Run all tests: every model family, compiled kernels, real hosts
	@$(MAKE) --no-print-directory $(REST)

rest:
	@echo $(REST)

test-cpp: gtest ## Run the C++ tests under ASan and UBSan
	$(call cpp_tests,asan)

test-tsan: gtest ## Run the C++ tests under TSan
	$(call cpp_tests,tsan)

define cpp_tests
$(call say,Compiling the C++ tests: $(1))
@mkdir -p build && cmake --preset $(1) > build/$(1).log || { cat build/$(1).log; false; }
@$(ALONE) cmake --build --preset $(1) --target tests
@ctest --preset $(1) --parallel $(JOBS) --progress
endef

test-arm64: $(VENV)/.tools ## Run the C++ tests for 64-bit Arm in an emulator
	{ command -v qemu-aarch64 && command -v aarch64-linux-gnu-g++; } >/dev/null \
	  || $(call install,qemu-user g++-aarch64-linux-gnu libgtest-dev,an emulator and a compiler for Arm)
	cmake --preset arm64 && cmake --build --preset arm64 && ctest --preset arm64

test-install: $(VENV)/.tools ## Install the C++ and C libraries, and build the examples with them
	tests/package/install.sh

# Tests that are marked slow belong to `make test-all`.
test-python: $(VENV)/.test ## Run the quick Python tests, or all of those in the folders TESTS
	$(PYTEST) $(or $(TESTS),-m "not slow")

test-slow: $(VENV)/.test-all browser
	$(PYTEST) -m slow

# Triton reads TRITON_INTERPRET when it is imported: interpreted and compiled are two processes.
test-kernels: $(VENV)/.test ## Run the GPU kernels in Triton's interpreter, one size of each
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" tests/kernels

test-interpreted: $(VENV)/.test-all
	TRITON_INTERPRET=1 $(PYTEST) -m slow tests/kernels

test-compiled: $(VENV)/.test-all
	$(PYTEST) --dist loadgroup tests/kernels_compiled

test-oldest: $(VENV)/.test-all ## Run the Hugging Face tests with the oldest transformers allowed
	PIP_CONSTRAINT= $(INSTALL) --no-deps --upgrade --target build/transformers-oldest \
	  transformers==$(TRANSFORMERS_OLDEST)
	PYTHONPATH=build/transformers-oldest $(PYTEST) -m "not any_transformers" $(OLDEST_TESTS)

# As another processor would: the plainest kernels of PyTorch, and of oneDNN those for SSE 4.1.
test-other-cpu: $(VENV)/.test-all ## Run the tests that depend on rounding as another processor would
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(PYTEST) $(NUMERICAL_TESTS)

test-newest: $(VENV)/.release ## Run everything with the newest packages that the requirements allow
	python tools/update.py --dry-run

update: $(VENV)/.release ## The same, and write constraints/ if all passes
	python tools/update.py

check: $(VENV)/.python ## Lint and test what has changed since main
	$(MAKE) $(VENV)/.python $$(python tools/check.py --needs $(VENV))
	python tools/check.py --jobs $(JOBS)

lint: $(VENV)/.lint $(VENV)/.test-all gtest ## Check format, style, types and imports
	ruff check
	ruff format --check
	MYPYPATH=python mypy -p fastdraft
	MYPYPATH=python:bench:tests/support:tests/kernels_compiled mypy bench
	PYTHONPATH=python lint-imports
	clang-format --dry-run --Werror $(CXX_FILES)
	cmake --preset dev
	python tools/tidy.py --jobs $(JOBS)

format: $(VENV)/.lint ## Rewrite the sources in the house's format
	ruff check --fix
	ruff format
	clang-format -i $(CXX_FILES)

fuzz: $(VENV)/.tools ## Fuzz the core for FUZZ_SECONDS a target; needs Clang
	@command -v clang++ >/dev/null || $(call install,clang libclang-rt-dev,the fuzzer)
	cmake --preset fuzz && cmake --build --preset fuzz
	for target in build/fuzz/fuzz_*; do $$target -max_total_time=$(FUZZ_SECONDS) || exit 1; done

campaign: $(VENV)/.test-all ## Run random cases of everything, and the fuzzers, for MINUTES; needs Clang
	end=$$(( $$(date +%s) + 60 * $(MINUTES) )); while [ $$(date +%s) -lt $$end ]; do \
	  $(PYTEST) -m hypothesis --hypothesis-profile=campaign \
	  && $(MAKE) --no-print-directory fuzz FUZZ_SECONDS=20 || exit 1; \
	done

stubs: $(VENV)/.test ## Regenerate the stub of the C++ module
	python tools/stubs.py

wheel: build/dist/.stamp ## Build the sdist and the wheel: build/dist

wheels: $(VENV)/.tools $(VENV)/.release ## Build a wheel that other Linux systems can install: build/wheels
	tools/wheels.sh

# The wheel was built from the checkout, compiled as users have it. The sdist is to show that it holds
# all that compiles.
FAST_BUILD = SKBUILD_CMAKE_BUILD_TYPE=Debug CMAKE_ARGS=-DCMAKE_CXX_FLAGS_DEBUG=-O0

package: build/dist/.stamp ## Try the wheel, the sdist and commands in environments without torch
	for file in build/dist/*.whl build/dist/*.tar.gz; do \
	  [ $$file = build/dist/*.whl ] || export FASTDRAFT_UNOPTIMISED=1; \
	  rm -rf build/clean && $(PYTHON) -m venv --without-pip build/clean \
	  && $(FAST_BUILD) pip --python build/clean install -qq --no-compile $$file \
	  && (cd build/clean && bin/python -W error ../../tests/package/package_smoke.py) || exit 1; \
	done
	$(INSTALL) --python build/clean 'fastdraft[cli]'
	cd build/clean && FASTDRAFT_UNOPTIMISED=1 bin/python -W error ../../tests/package/package_smoke.py

rehearsal: $(VENV)/.tools $(VENV)/.release ## Rehearse a release on this machine: build/rehearsal
	tools/rehearse.sh

bench: $(VENV)/.bench gtest ## Run the microbenchmarks, beside the peers that can be installed
	@rm -f $(VENV)/.core && $(MAKE) --no-print-directory $(VENV)/.core LTO=ON
	cmake --preset release && cmake --build --preset release
	! command -v valgrind > /dev/null || python bench/instructions.py build/release/bench_operations
	python bench/verification.py
	python -m pytest bench $(DATA:%=--data %)
ifdef DATA
	python bench/calibration.py --data $(DATA)
	export PYTHONPATH=$$(python bench/baselines.py) && fastdraft replay $(DATA) --peers \
	  --token-cost 0 --token-cost 0.02 --token-cost 0.05 --token-cost 0.2
	fastdraft replay $(DATA) --tree-budget 32 \
	  --token-cost 0 --token-cost 0.02 --token-cost 0.05 --token-cost 0.2
endif

plots: $(VENV)/.bench ## Draw the documentation's images from the committed results
	fastdraft replay --sample --show edit-1 --svg docs/images/coloured-answer.svg > /dev/null
	python bench/plots.py

# On a CPU; bench/serving.py has what fits a GPU by default.
LIVE ?= --rows 1 4 16 --prompt-tokens 256 --new-tokens 64 --workloads recorded \
  --serve "--dtype float32 --enforce-eager --distributed-executor-backend uni"
bench-serving: build/hosts/vllm/.ready build/dist/.stamp $(VENV)/.bench ## Measure drafters in vLLM's server on DATA
	$(INSTALL_WHEEL) --python build/hosts/vllm
	export PYTHONPATH=$$(python bench/baselines.py) $(DEMO_MODEL) && \
	  OMP_WAIT_POLICY=passive VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=2 \
	  OMP_NUM_THREADS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \
	  build/hosts/vllm/bin/python bench/serving.py --data $(DATA) $(LIVE)

# Where the folder was carried to and nothing else was made, the machine's own Python and torch run.
ifeq ($(wildcard $(VENV))$(wildcard $(CARRY)/.complete),$(CARRY)/.complete)
GPU_NEEDS := build/gpu/site/.stamp
GPU_PYTHON := PYTHONPATH=$(abspath build/gpu/site) $(PYTHON)
# Of a machine that is lent by the minute, building takes its share.
GPU_BEGAN := --began $(shell date +%s)
else
GPU_NEEDS := $(VENV)/.test-all
GPU_PYTHON := python
endif

gpu: $(GPU_NEEDS) ## Check and measure all on a GPU; elsewhere a rehearsal
	$(GPU_PYTHON) bench/gpu.py $(if $(GPU_REHEARSAL),--rehearsal) $(GPU_BEGAN) $(GPU)

gpu-carry: $(VENV)/.python ## Fetch what a GPU machine without a network lacks: CARRY
	tools/gpu_carry.sh $(CARRY)

docs: $(VENV)/.docs ## Build the documentation: build/docs; warnings are errors
	sphinx-build --fail-on-warning --keep-going --quiet docs build/docs

docs-links: $(VENV)/.docs ## Check that the documentation's links to other sites answer
	sphinx-build --builder linkcheck --quiet docs build/docs-links

clean: ## Remove what was built, and the environments
	rm -rf build .bench-venv $(VENV)

$(VENV)/.python: tools/uv.py
	@$(PYTHON) -c 'import sys; version = sys.version.split()[0]; \
	  sys.version_info >= (3, 10) or sys.exit("fastdraft needs Python 3.10 or newer, got " + version); \
	  sys.version_info < (3, 15) or print("constraints/ was made for Python 3.10 to 3.14, and this is " \
	    + version + ": if an installation fails, use PYTHON=python3.14", file=sys.stderr)'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(call install,python3-venv,an environment for Python)
	$(call say,An environment for Python in $(VENV))
	@$(PYTHON) -m venv $(VENV)
	@pip install -q uv
	@touch $@

$(VENV)/.tools: $(VENV)/.python tools/build.txt constraints/main.txt
	@command -v c++ >/dev/null || $(call install,g++,a compiler for the C++ core)
	@$(PYTHON) -c '$(HAS_PYTHON_H)' || $(call install,python3-dev,headers for the C++ module)
	$(call say,What builds the package: 45 MB)
	@$(INSTALL) -r tools/build.txt
	@touch $@

$(VENV)/.release: $(VENV)/.python tools/release.txt constraints/main.txt
	$(INSTALL) -r tools/release.txt
	touch $@

# The next two are looked for each time, so no file says that something is there which is not.
gtest: $(VENV)/.python
	@echo '#include <gtest/gtest.h>' | c++ -E -x c++ -o /dev/null - 2>/dev/null \
	  || $(if $(MAY_INSTALL),$(call install,libgtest-dev,GoogleTest for the C++ tests),\
	    echo "GoogleTest (libgtest-dev) is not installed: CMake downloads it")

browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null \
	  || $(if $(MAY_INSTALL),$(call install,chromium,a browser for the tests of pages),\
	    echo "There is no Chromium: tests of pages in a browser are skipped")

# One that has this version already keeps it. The second command also looks where the first one did.
$(VENV)/.torch: $(VENV)/.python constraints/main.txt
	$(call say,PyTorch $(TORCH): 190 MB where no GPU is)
	@python -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != "$(TORCH)")' 2>/dev/null || \
	if [ "$$(uname)" != Linux ] || command -v nvidia-smi >/dev/null; then \
	  $(INSTALL) torch==$(TORCH); \
	else \
	  $(INSTALL) torch==$(TORCH)+cpu 2>/dev/null || \
	  $(INSTALL) --extra-index-url $(TORCH_INDEX) torch==$(TORCH)+cpu; \
	fi
	@touch $@

# Editable: the Python files are used where they lie. It compiles in a folder of its own, so that
# `pip install .` may run beside it.
$(VENV)/.editable: pyproject.toml | $(VENV)/.tools
	$(call say,Compiling the C++ module: two minutes)
	@$(ALONE) env -u PIP_BUILD_CONSTRAINT pip install -q --no-compile --no-build-isolation --no-deps --editable .
	@touch $@

# After an edit only what it concerns is compiled again. Benchmarks measure what wheels hold, which
# is optimised across files.
LTO ?= OFF
$(VENV)/.core: $(CORE_FILES) | $(VENV)/.editable
	@cmake -DFASTDRAFT_LTO=$(LTO) -DCMAKE_UNITY_BUILD=$(LTO) build/editable > /dev/null
	@$(ALONE) cmake --build build/editable
	@cmake --install build/editable --prefix \
	  $$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/fastdraft > /dev/null
	@touch $@

# The module compiles while PyTorch is fetched.
$(VENV)/.package: pyproject.toml constraints/main.txt $(CORE_FILES)
	@$(MAKE) --no-print-directory -j 2 $(VENV)/.core $(VENV)/.torch
	@[ -e $@ ] && [ $@ -nt pyproject.toml ] && [ $@ -nt constraints/main.txt ] \
	  || { echo "::: transformers and what else the demo needs: 45 MB"; $(INSTALL) 'fastdraft[demo]'; }
	@touch $@

# The groups of pyproject.toml.
$(VENV)/.test $(VENV)/.test-all $(VENV)/.lint $(VENV)/.bench $(VENV)/.docs: pyproject.toml \
    constraints/main.txt | $(VENV)/.package
	$(call say,The packages of $(patsubst .%,%,$(notdir $@)))
	@$(INSTALL) --group $(patsubst .%,%,$(notdir $@))
	@touch $@

build/gpu/site/.stamp: $(PACKAGE_FILES)
	$(PYTHON) -m pip install -q --no-index --no-deps --upgrade --target build/gpu/site $(CARRY)/*.whl
	env -u PIP_BUILD_CONSTRAINT PYTHONPATH=$(abspath build/gpu/site) $(PYTHON) -m pip install -q --no-index --no-deps \
	  --no-build-isolation --upgrade --target build/gpu/site .
	touch $@

build/dist/.stamp: $(PACKAGE_FILES) | $(VENV)/.tools
	$(call say,Building the wheel: a minute)
	mkdir -p build && rm -rf build/dist
	python -m build --no-isolation --sdist --wheel --config-setting build-dir=build/wheel \
	  --outdir build/dist > build/wheel.log || { cat build/wheel.log; exit 1; }
	touch $@

endif
