# Everything sets itself up: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
WORKERS ?= 2
PART ?= 1/1
RESULTS ?= benchmarks/results
TABLES := docs/performance.md

.PHONY: help demo train test test-all test-gpu lint format bench bench-gpu bench-nodes bench-nodes-gpu bench-ll bench-ll-gpu bench-elastic docs clean

help:  ## this list
	@grep -E "^[a-z-]+:.*##" $(MAKEFILE_LIST) | sed -E "s/:.*## /\t/" | expand -t 17

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(READY)  ## four CPU ranks dispatch tokens to experts and combine them back, then train a small model
	$(RUN) -m deep_ep demo
	@echo
	$(RUN) examples/train_moe.py --ranks 4 --device cpu --steps 60

train: $(READY)  ## the training run of the picture in docs/training.md
	$(RUN) examples/train_moe.py --ranks 4 --device cpu --steps 200 --measure --plot docs/train_moe.png

test: $(READY)  ## the suite on the CPU, but what is long and rarely the first to fail
	$(RUN) -m pytest tests --numprocesses $(WORKERS) -m "not exhaustive"

test-all: $(READY)  ## the whole suite, on the CPU
	$(RUN) -m pytest tests --numprocesses $(WORKERS)

test-gpu:  ## the whole suite on this machine's GPU, with the python that is there; PART=2/8: the second of eight parts
	PYTHONPATH=src $(PYTHON) -m pytest tests --device cuda --part $(PART)

lint: $(READY)  ## format, ruff, types, import layers
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(READY)  ## rewrite the files the way `make lint` wants them
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: $(READY)  ## the benchmark of normal mode; like all of them, it writes its table into docs/performance.md
	$(RUN) -m deep_ep bench normal --readme $(TABLES)

bench-gpu:  ## the same on this machine's GPU, with the python that is there; results are kept
	PYTHONPATH=src $(PYTHON) -m deep_ep bench normal --device cuda --save $(RESULTS) --readme $(TABLES)

bench-nodes: $(READY)  ## the benchmark across nodes, over loopback and, as root, over links of 1 Gbit/s
	$(RUN) -m deep_ep bench internode --readme $(TABLES)
	$(RUN) -m deep_ep bench internode --nodes 2 --ranks-per-node 4 --link 1gbit --tokens 1024 --rounds 9 --readme $(TABLES)

bench-nodes-gpu:  ## two hops on this machine's GPU, ranks as nodes, by messages and by NVSHMEM; results are kept
	PYTHONPATH=src $(PYTHON) -m deep_ep bench internode --device cuda --transport message --save $(RESULTS) --readme $(TABLES)
	PYTHONPATH=src $(PYTHON) -m deep_ep bench internode --device cuda --transport nvshmem --save $(RESULTS) --readme $(TABLES)

bench-ll: $(READY)  ## the benchmark of low-latency mode
	$(RUN) -m deep_ep bench low-latency --readme $(TABLES)

bench-elastic: $(READY)  ## the benchmark of ElasticBuffer
	$(RUN) -m deep_ep bench elastic --readme $(TABLES)

bench-ll-gpu:  ## the same on this machine's GPU, with the python that is there; results are kept
	PYTHONPATH=src $(PYTHON) -m deep_ep bench low-latency --device cuda --ranks 2 8 --rounds 25 --save $(RESULTS) --readme $(TABLES)

$(VENV)/.docs-ready: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

docs: $(VENV)/.docs-ready  ## the site, with the API reference, into build/site; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "open build/site/index.html, or for its search: $(RUN) -m http.server --directory build/site"

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
