# The commands of this repository.  `make demo` and `make test` need only Python 3.10+ and make; they set up .venv first.

PYTHON     ?= python3
CHECKPOINT ?= tests/fixtures/gptq-w4-g128-sym-descact-false-qwen3moe1l
PIP_ARGS   ?=
TEST_ARGS  ?=
MACHINES   ?= x86_64,aarch64
BUF        := @bufbuild/buf@1.75.0

BIN   := .venv/bin
STAMP := .venv/setup-done
DEPLOY := .venv/deploy-done
NATIVE := $(wildcard kernels/expertd_kernels/native/csrc/*.cpp kernels/expertd_kernels/native/csrc/*.h \
  proto/expertd/shm/csrc/*.cpp proto/expertd/shm/csrc/*.h \
  proto/expertd/e4m3/csrc/*.cpp proto/expertd/e4m3/csrc/*.h \
  server/expertd_server/engine/csrc/*.cpp server/expertd_server/engine/csrc/*.h \
  client/expertd_client/cluster/csrc/*.cpp)

.PHONY: help setup demo test triton check lint format proto golden docs bench wheel clean

help:           ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## .venv with everything pinned by constraints.txt, the package editable, the native kernel compiled

# torch comes first and alone: a later resolver run then keeps the CPU build instead of fetching CUDA packages.
$(STAMP): pyproject.toml constraints.txt hatch_build.py $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt torch
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt hatchling editables
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt --no-build-isolation -e '.[test]'
	touch $(STAMP)

# tritonclient calls the KServe facade in a test.  Without its own requirements: it asks for an older protobuf than it needs.
# What checks deploy/: 120 MB that serving, the demo and all other tests do without.
$(DEPLOY): $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt --no-build-isolation -e '.[deploy]'
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt --no-deps tritonclient python-rapidjson
	touch $(DEPLOY)

# buf speaks to the server over reflection in one test and lints the contract; without npm that test says so and is skipped.
node_modules/.bin/buf:
	@if command -v npm >/dev/null; then npm install --silent --no-save --no-package-lock --no-fund --no-audit $(BUF); \
	else echo "npm is not installed: buf lint and the buf curl test are left out"; fi

demo: $(STAMP)  ## serve a small GPTQ checkpoint, call it, check every answer: make demo [CHECKPOINT=DIR]
	$(BIN)/python deploy/demo.py --checkpoint $(CHECKPOINT)

test: $(STAMP) $(DEPLOY) node_modules/.bin/buf ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --cache-clear -n 2 --dist loadfile $(TEST_ARGS) || $(BIN)/python tests/again.py $$?

triton: $(STAMP) ## compile the GPU kernels under each Triton that the oracle takes; fetches them into build/triton once
	EXPERTD_TEST_TRITON=all $(BIN)/python -m pytest tests/kernels/backends/gluon/shared/test_triton_versions.py

check: lint test ## what CI runs

lint: $(STAMP) node_modules/.bin/buf ## ruff, mypy, pyright, import-linter, buf lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/pyright --warnings --pythonpath $(BIN)/python
	if test -x node_modules/.bin/buf; then node_modules/.bin/buf lint proto && \
	  node_modules/.bin/buf breaking proto --against tests/golden/wire_v1.binpb; fi

format: $(STAMP) ## apply the formatter and the fixes that are safe
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP) ## regenerate the stubs from the contract
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto proto/expertd/v1/*.proto proto/expertd/kserve/*.proto
	$(BIN)/python -m grpc_tools.protoc -Iproto --grpc_python_out=proto proto/expertd/v1/*_service.proto

docs: $(STAMP)  ## regenerate what docs/ has from the code: pages, the picture of the rooms, the index of DECISIONS.md
	$(BIN)/python docs/pages.py

bench: $(STAMP) ## kernel benchmark of this machine's CPU
	$(BIN)/python -m expertd_kernels.bench --device cpu

wheel: $(STAMP) ## dist/*.whl for every Linux with glibc 2.28 and newer, checked: make wheel [MACHINES=x86_64,aarch64]
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt ziglang auditwheel
	$(BIN)/python deploy/wheel.py build --machine $(MACHINES)

clean:          ## remove .venv and everything built
	rm -rf .venv node_modules build dist
	find . -name '*.so' -path '*csrc*' -delete
