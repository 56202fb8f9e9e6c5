# `make setup` makes .venv; every other target calls it first, and it does nothing when nothing has changed.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
export KVPOOL_VENV := $(abspath $(VENV))

.DEFAULT_GOAL := help
.PHONY: help setup deps demo demo-ssd demo-pd guide-tree check test test-full conformance bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make the development environment in .venv (PYTHON=... chooses the interpreter)
	@scripts/setup.sh

deps: ## install the system packages that tests of the other stores need (apt; as root or with sudo)
	@scripts/deps.sh

demo: setup ## a real model, twice: cold, then from the pool after a restart
	@$(BIN)/python examples/demo.py

demo-ssd: setup ## the same with a disk tier: from the disk after the pool's memory was wiped
	@$(BIN)/python examples/demo_ssd.py

demo-pd: setup ## prefill, decode, pool and proxy: a conversation of two turns, compared with one plain engine
	@$(BIN)/kvpool demo --pd

guide-tree: ## the folder vllm-ascend/examples, so that the guide's proxy command runs as it is written
	@scripts/guide_tree.sh $(DIR)

check: setup ## lint, format, types, import floors, sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sizes.py

test: setup ## the tests without the slow ones
	@scripts/test.sh $(ARGS)

test-full: setup ## every test, the whole engine matrix included
	@scripts/test.sh -m "" $(ARGS)

conformance: setup ## one store against the contract: STORE=local|mooncake|memcache|yuanrong; starts and stops its service
	@$(BIN)/python -m tools.conformance $(STORE)

bench: setup ## measure (half an hour, on an idle machine; ARGS="local stores" for some parts, "--quick" to try it)
	@$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove what builds and tests leave in the tree (not .venv, not the cached models)
	rm -rf vllm-ascend build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
