# The commands of this repository.  `make demo` and `make test` need only Python 3.10+ and make; they set up .venv first.

PYTHON     ?= python3
CHECKPOINT ?= tests/fixtures/gptq-w4-g128-sym-descact-false-qwen3moe1l
PIP_ARGS   ?=
TORCH_INDEX ?=
TEST_ARGS  ?=
SOAK_S     ?= 600
MACHINES   ?= x86_64,aarch64
BUF        := @bufbuild/buf@1.75.0

BIN   := .venv/bin
STAMP := .venv/setup-done
DEPLOY := .venv/deploy-done
SIMDE := build/simde/usr/include/simde/x86/avx512.h
NATIVE := $(wildcard kernels/expertd_kernels/native/csrc/*.cpp kernels/expertd_kernels/native/csrc/*.h \
  proto/expertd/shm/csrc/*.cpp proto/expertd/shm/csrc/*.h \
  proto/expertd/e4m3/csrc/*.cpp proto/expertd/e4m3/csrc/*.h \
  server/expertd_server/engine/csrc/*.cpp server/expertd_server/engine/csrc/*.h \
  client/expertd_client/cluster/csrc/*.cpp)

.PHONY: help setup demo test soak vendor engines triton aarch64 check lint format proto docs bench wheel clean

help:           ## this list
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## .venv with everything pinned by constraints.txt, the package editable, the native kernel compiled

# torch comes first and alone: a later resolver run then keeps the CPU build instead of fetching CUDA packages.  From
# TORCH_INDEX without its requirements: that index has few versions of them.
$(STAMP): pyproject.toml constraints.txt hatch_build.py $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setup, 1 of 2: torch into .venv (minutes where it has to be downloaded)"
	@test -z "$(TORCH_INDEX)" || \
	  $(BIN)/python -m pip install -q $(PIP_ARGS) --index-url "$(TORCH_INDEX)" -c constraints.txt --no-deps torch
	@$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt torch
	@echo "setup, 2 of 2: all other packages, tools of tests among them, and compiling C++ (minutes on two cores)"
	@$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt hatchling editables
	@$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt --no-build-isolation -e '.[test]'
	@touch $(STAMP)

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

# The headers of a second emulation of AVX-512, beside our own, in one test; without apt that test says so and is skipped.
$(SIMDE):
	@if command -v apt-get >/dev/null && mkdir -p build/simde && cd build/simde && apt-get download -q libsimde-dev >/dev/null 2>&1; \
	then dpkg-deb -x libsimde-dev_*.deb .; else echo "libsimde-dev cannot be fetched: the second emulation of AVX-512 is left out"; fi

demo: $(STAMP)  ## serve a small GPTQ checkpoint, call it, check every answer: make demo [CHECKPOINT=DIR]
	$(BIN)/python deploy/demo.py --checkpoint $(CHECKPOINT)

# A worker that crashes ends the run: pytest-xdist may wait for ever for the tests of one that is replaced.
WORKERS := -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

test: $(STAMP) $(DEPLOY) node_modules/.bin/buf ## the whole test suite
	$(BIN)/python tests/kernels/cpu_levels.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --cache-clear $(WORKERS) $(TEST_ARGS)

# Where its time is over, it fails: what has not run is not known to work.
soak: $(STAMP) $(DEPLOY) node_modules/.bin/buf $(SIMDE) ## the long forms, which `make test` leaves out; within SOAK_S seconds
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak --session-timeout=$(SOAK_S) $(WORKERS) $(TEST_ARGS)

vendor: $(STAMP) ## the Python sources of vendors' wheels, which tests compare with: 300 MB over the line, once
	$(BIN)/python tests/kernels/fetch_vendor.py
	$(BIN)/python tests/engines/fetch_engines.py

engines: $(STAMP) ## the same with vLLM's wheels, 1.5 GB over the line; what the adapters use of each is compared
	$(BIN)/python tests/engines/fetch_engines.py --large
	$(BIN)/python -m pytest tests/engines/test_versions.py

# Some two minutes of a core and 440 MB, so CI leaves it out.  The self-test in C++ alone: Python and torch are not emulated.
aarch64: $(STAMP) ## the CPU kernel's self-test for aarch64, compiled by ziglang, run by Debian's qemu-user
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt ziglang
	mkdir -p build/aarch64 && cd build/aarch64 && apt-get download -q qemu-user-static libc6-arm64-cross
	cd build/aarch64 && for d in *.deb; do dpkg-deb -x $$d . || exit 1; done
	$(BIN)/python -m expertd_kernels.native.csrc.build --program tests/kernels/native/self_test.cpp \
	  --machine aarch64 --out build/aarch64/self_test
	build/aarch64/usr/bin/qemu-aarch64-static -L build/aarch64/usr/aarch64-linux-gnu build/aarch64/self_test

triton: $(STAMP) ## compile the GPU kernels under each Triton that the oracle takes; fetches them into build/triton once
	EXPERTD_TEST_TRITON=all $(BIN)/python -m pytest -m "" tests/kernels/backends/gluon/shared/test_triton_versions.py

check: lint test ## what CI runs

lint: $(STAMP) node_modules/.bin/buf ## ruff, mypy, pyright, import-linter, buf lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy & $(BIN)/pyright --warnings --pythonpath $(BIN)/python; code=$$?; wait $$! && exit $$code
	if test -x node_modules/.bin/buf; then node_modules/.bin/buf lint proto && \
	  node_modules/.bin/buf breaking proto --against tests/golden/wire_v1.binpb; fi

format: $(STAMP) ## apply the formatter and the fixes that are safe
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP) ## regenerate the stubs from the contract
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto proto/expertd/v1/*.proto proto/expertd/kserve/*.proto
	$(BIN)/python -m grpc_tools.protoc -Iproto --grpc_python_out=proto proto/expertd/v1/*_service.proto

docs: $(STAMP)  ## regenerate what docs/ has from the code: pages and the picture of the rooms
	$(BIN)/python docs/pages.py

bench: $(STAMP) ## kernel benchmark of this machine's CPU
	$(BIN)/python -m expertd_kernels.bench --device cpu

wheel: $(STAMP) ## dist/*.whl for every Linux with glibc 2.28 and newer, checked: make wheel [MACHINES=x86_64,aarch64]
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt ziglang auditwheel
	$(BIN)/python deploy/wheel.py build --machine $(MACHINES)

clean:          ## remove .venv and everything built
	rm -rf .venv node_modules build dist
	find . -name '*.so' -path '*csrc*' -delete
