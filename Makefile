# Two commands need nothing but Python 3.10 to 3.13 with venv, make and a package registry:
#   make demo   the whole system at work, in plain words and figures
#   make test   everything that CI checks
# The rest (check, matrix, safety, fuzz, faults, failures, soak, bench, plots, eviction, docs, format, clean) is for
# people who change the code.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One more than two cores: many tests wait for a device, a start or a deadline.
PYTEST_WORKERS ?= 3
PYTEST_ARGS ?=
ARGS ?=
SECONDS ?= 60
MINUTES ?= 30
# Byte code is made when a module is first imported: most of what LMCache brings along never is.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
# Folders with the longest files come first, and stay first, so that no worker ends alone with one of them.
PYTEST := $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder
CORE_TESTS := daemon_ext/tests/core protocol/tests
# No configuration: it names every package, and would warn of those that these tests don't import.
COVERAGE_OF := --cov-branch --cov-config=/dev/null --cov-report=term:skip-covered --cov-fail-under=100 --cov

# Hundreds of processes start here. Where byte code may not be written each compiles all that it imports anew,
# which doubles the time of an import of LMCache and is most of a start of hypercached.
unexport PYTHONDONTWRITEBYTECODE
export LMCACHE_TRACK_USAGE := false
export LMCACHE_DISABLE_BANNER := 1

.PHONY: demo test check matrix safety fuzz faults failures soak bench plots eviction docs format clean

demo: $(STAMP)
	@$(BIN)/python -m hypercache_compat.demo

test: check
ifeq ($(PYTEST_ARGS),)
	@echo "== tests of the protocol and of the daemon's core, which must reach every branch of them =="
	@$(PYTEST) $(CORE_TESTS) -m "not hypothesis" $(COVERAGE_OF)=hypercache_protocol --cov=hypercache_daemon.core
	@echo "== the same folders' tests that draw what they try: what they reach differs from run to run =="
	@$(PYTEST) $(CORE_TESTS) -m hypothesis
	@echo "== all other tests =="
	@$(PYTEST) compat_tests/tests connector/tests daemon_ext/tests --ignore=daemon_ext/tests/core
else
	@$(PYTEST) $(PYTEST_ARGS)
endif

check: $(STAMP)
	@echo "== lint, format, types, import contracts =="
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

matrix: $(STAMP)
	@$(BIN)/python -m hypercache_compat.matrix

# In all cells of its table; `make test` runs the short form. ARGS="--help" lists its options.
safety: $(STAMP)
	@PYTHONPATH=connector $(BIN)/python -m safety $(ARGS)

# Bounded; the fuzzer is not among the tools that everybody needs, so it is installed here.
fuzz: $(STAMP)
	@$(INSTALL) --quiet --group fuzz
	@mkdir -p .cache/fuzz
	@cd .cache/fuzz && $(abspath $(BIN))/python ../../protocol/fuzz/fuzz_sessions.py \
	    -max_total_time=$(SECONDS) -max_len=4096 -rss_limit_mb=1024 -print_final_stats=1

# Bounded by SECONDS; `make test` injects each fault once.
faults: $(STAMP)
	@$(BIN)/python daemon_ext/faults/inject_faults.py --seconds $(SECONDS)

# Some ten minutes: whatever can go wrong goes wrong, for HyperCache and for two of LMCache's own adapters.
failures: $(STAMP)
	@PYTHONPATH=connector $(BIN)/python -m failures $(ARGS)

# Bounded by MINUTES; `make test` soaks for SOAK_SECONDS (8; CI wants 60).
soak: $(STAMP)
	@PYTHONPATH=connector $(BIN)/python -m failures.soak --minutes $(MINUTES) $(ARGS)

bench: $(STAMP)
	@$(BIN)/python benchmarks/run.py

# From what was recorded last. What draws is not among the tools that everybody needs, so it is installed here.
plots: $(STAMP)
	@$(INSTALL) --quiet --group plots
	@$(BIN)/python benchmarks/plots.py

# A block trace in TRACE, as jsonl or jsonl.gz; without one a load is made up.
eviction: $(STAMP)
	@$(BIN)/python benchmarks/eviction.py $(or $(TRACE),--made-up 1)

docs: $(STAMP)
	@$(BIN)/python docs/generate.py

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage

# pip first: dependency groups need 25.1. torch second: its pin must stand before lmcache asks for any torch,
# because the newest one is a build for GPUs of several GB.
$(STAMP): pyproject.toml
	@echo "== 1 of 3: a virtual environment in $(VENV) (with $(PYTHON)) =="
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else \
	    "Python 3.10 to 3.13 is needed and $(PYTHON) is %d.%d: run make with PYTHON=python3.12, say" % v)'
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --upgrade "pip>=25.1"
	@echo "== 2 of 3: torch, the build without a GPU (about 200 MB) =="
	@$(INSTALL) "torch==2.13.0" "numpy<=2.2.6"
	@echo "== 3 of 3: LMCache, the tools and this project; meanwhile the released clients that the suite drives =="
	@PYTHONPATH=compat_tests/src $(BIN)/python -m hypercache_compat.releases & releases=$$!; \
	    $(INSTALL) -e ".[daemon,lmcache]" --group dev; installed=$$?; \
	    wait $$releases && exit $$installed
	@touch $@
