# Needs Python 3.10+ and make; everything else is set up in .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ENVS := tests/env tests/serving

.PHONY: run test test-envs test-others test-slow check bench docs clean

run: $(READY)  ## train PPO on CartPole, about a minute; results in runs/cartpole
	$(BIN)/rlsample train --algo ppo --env CartPole-v1 --num-envs 8 --seed 0 --stop-return 475 --max-steps 300000 --out runs/cartpole --overwrite

test: $(READY)  ## the test suite, a few minutes; each half of it in its own process
	$(MAKE) --no-print-directory -j 2 test-envs test-others

test-envs: $(READY)
	$(BIN)/python -m pytest -q $(ENVS)

test-others: $(READY)
	$(BIN)/python -m pytest -q $(ENVS:%=--ignore %)

test-slow: $(READY)  ## learning runs and long storms
	$(BIN)/python -m pytest -q -m slow

check: $(READY)  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## sampling against the hand-written limits, interleaved
	$(BIN)/python benchmarks/sampling.py

docs: $(READY)  ## docs/config.md from the settings
	$(BIN)/python -m rlsample.cli.config_docs

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	touch $@

clean:
	rm -rf .venv runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
