# Each target makes the virtual environment that it needs; only Python >= 3.11, make and a
# package registry are expected. PYTHON chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := ortplugins session_options rewrite_rules
SOURCES := $(PACKAGES) tests benchmarks examples
# Tests start hundreds of processes, and each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-exhaustive test-mutations test-strength test-peers test-arm64 test-versions test-packages test-exporters test-servers test-packaging test-pythons test-tutorial check lint bench bench-peers bench-quantizers docs dist clean

help:
	@echo "make demo       compare plain onnxruntime with ortplugins on SmolLM2-135M, in one table (5 minutes)"
	@echo "make test       run static checks and all fast tests (4 to 8 minutes on 2 cores)"
	@echo "make test-exhaustive  try every layout and bad input, and fuzz for long (25 minutes)"
	@echo "make test-strength  break the code at 60 places drawn at random; the nearest tests have to fail (30 minutes)"
	@echo "make test-mutations  rewrite 5,000 mutants of models and compare results (40 minutes)"
	@echo "make test-peers  run onnx's backend tests, and the models below MODELS, through all passes (8 minutes)"
	@echo "make test-arm64 test the core on emulated aarch64 (20 minutes)"
	@echo "make test-versions  run the same files on onnxruntime 1.24 to 1.32 (5 minutes)"
	@echo "make test-packaging  install wheel and sdist in empty environments (5 minutes)"
	@echo "make test-pythons  run the wheel on Python 3.11 to 3.14, where installed (10 minutes)"
	@echo "make test-tutorial  run the second half of docs/start.md in a fresh clone, with torch and a server (5 minutes)"
	@echo "make test-packages  run fastembed, rapidocr and others under 'ortplugins run' (10 minutes)"
	@echo "make test-exporters  fuse exports of the newest torch and transformers (10 minutes)"
	@echo "make test-servers  run uvicorn, gunicorn, uWSGI, LitServe, BentoML, Ray Serve, Triton (20 minutes)"
	@echo "make bench      measure every figure of docs/benchmarks.md (15 minutes)"
	@echo "make bench-peers  compare six nets with onnxruntime and OpenVINO, time and error (20 minutes)"
	@echo "make bench-quantizers  compare quantisers with ModelOpt and onnxruntime, quality included (2 hours)"
	@echo "make docs       build the documentation, as a site in site/"
	@echo "make dist       build the wheel, in dist/"
	@echo "make clean      remove everything that the others made"

# pip install is repeated only when the project's description changes.
$(VENV)/.installed-%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

demo: $(VENV)/.installed-demo
	$(BIN)/python -m examples.smollm2.demo

# mypy takes nothing from a cache that it made for another platform.
check: $(VENV)/.installed-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	printf "%s\n" linux win32 darwin | xargs -P 3 -I @ $(BIN)/mypy --platform @ --cache-dir .mypy_cache/@
	$(BIN)/lint-imports

# The tests come last: their closing line closes the output.
test: check
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# What make test samples: all layouts of the matrix, all exporters, all bad inputs, long fuzzes.
test-exhaustive: $(VENV)/.installed-dev
	ORTPLUGINS_EXHAUSTIVE=1 ORTPLUGINS_FUZZ=20 $(BIN)/python -m pytest -n 2 --dist loadgroup \
	  tests/rewrite_rules/weights/test_layout_matrix.py tests/rewrite_rules/test_bad_input.py \
	  tests/rewrite_rules/shapes/test_shape_fuzz.py tests/rewrite_rules/trim_padding/test_coverage.py

# Needs Debian's packages and a registry; emulated by qemu, which goes to .cache/arm64.
test-arm64: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -p no:randomly tests/checks/arm64/check_arm64.py

# In a copy of the project. COUNT and SEED choose others.
test-strength: $(VENV)/.installed-dev
	ORTPLUGINS_COUNT=$(or $(COUNT),60) ORTPLUGINS_SEED=$(or $(SEED),0) \
	  $(BIN)/python -m pytest -p no:randomly -n 2 tests/checks/strength/check_strength.py

# Models that mean something else, or look so; those that come out wrong go to .cache/mutants.
# COUNT and SEED choose others.
test-mutations: $(VENV)/.installed-dev
	cd tests && PYTHONWARNINGS=ignore ../$(BIN)/python -m mutations --count $(or $(COUNT),5000) \
	  --seed $(or $(SEED),0) --out ../.cache/mutants

# onnx's backend tests, and the models below the folders in MODELS (colons between them).
test-peers: $(VENV)/.installed-dev
	ORTPLUGINS_PEER_MODELS="$(MODELS)" $(BIN)/python -m pytest -q -p no:randomly -n 2 tests/checks/peers/check_peers.py

# Virtual environments for the old versions go to .cache; without a registry it skips them.
test-versions: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -p no:randomly tests/checks/versions/check_versions.py tests/checks/upstream/check_findings.py

# Builds, checks and installs the wheel where nothing else is; needs the registry.
test-packaging: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -p no:randomly tests/checks/packaging/check_install.py

test-pythons: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -p no:randomly -s -k a_python_runs_the_wheel tests/checks/packaging/check_install.py

# A clone, torch, an export, int4, a server: every command of the page; needs the registry.
test-tutorial: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -p no:randomly -s tests/checks/packaging/check_tutorial.py

# The packages go to .cache, with torch for two of them; what can't be installed is skipped.
test-packages: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -p no:randomly tests/checks/packages/check_packages.py

# Needs the registry: torch and transformers go to .cache/exporters.
test-exporters: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -p no:randomly tests/checks/exporters/check_exporters.py

# The servers of examples/, stock beside ours; prints the rows of docs/serving.md.
test-servers: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -p no:randomly -s tests/checks/servers/check_servers.py

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.run

bench-peers: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.run --only runtimes

# The other quantizers go to .cache (4 GB with torch); ORTPLUGINS_PEERS names a Python that has them.
# All parts run, whatever bounds one of them misses.
bench-quantizers: $(VENV)/.installed-bench
	status=0; $(BIN)/python -m benchmarks.quantizers.quantizers || status=1; \
	$(BIN)/python -m benchmarks.quantizers.perplexity || status=1; exit $$status

docs: $(VENV)/.installed-docs $(VENV)/.installed-dev
	$(BIN)/mkdocs build --strict

dist: $(VENV)/.installed-dev
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) .cache site dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
