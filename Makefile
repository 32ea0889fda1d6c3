# make install   set up .venv (done by the others when needed)
# make demo      a whole swarm on this machine; ARGS='--steps 100 --cheat wrong-weights'
# make test      the tests;  make test-slow  those that take minutes
# make lint      style, types, and which room may import which

PYTHON ?=
ARGS ?=
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: install demo test test-slow lint clean

install: .venv/installed

.venv/installed: requirements.lock pyproject.toml tools/install.sh
	@PYTHON='$(PYTHON)' tools/install.sh

demo: .venv/installed
	@$(BIN)/swarm demo $(ARGS)

test: .venv/installed
	$(PYTEST) $(ARGS)

test-slow: .venv/installed
	$(PYTEST) -m slow $(ARGS)

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p swarm -p peers -p simnet -p benchmarks -p tests
	$(BIN)/lint-imports

clean:
	rm -rf .venv build demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache
