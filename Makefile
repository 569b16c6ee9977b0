# The doorstep: plain pip and snakemake, in a virtual environment of this folder.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
STAMP = $(VENV)/.installed

.PHONY: demo test test-sglang lint docs bench clean-venv

# Prompts to a measured drafter, with the default configuration.
demo: $(STAMP)
	$(VENV)/bin/snakemake --cores all

# The linters, then every test but those that need SGLang.
test: $(STAMP) lint
	$(VENV)/bin/python -m pytest --ignore tests/integration/sglang

# The tests against real SGLang servers on the CPU, in an environment that is made first (four minutes, 2.6 GB).
test-sglang: $(STAMP)
	$(VENV)/bin/python tests/integration/sglang/make_environment.py
	$(VENV)/bin/python -m pytest tests/integration/sglang

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/snakefmt --check Snakefile rules
	$(VENV)/bin/snakemake --lint
	$(VENV)/bin/mypy

# Every benchmark, on an otherwise idle machine: about an hour with the peers' installation.
bench: $(STAMP)
	$(VENV)/bin/python benchmarks/train_step.py --json
	$(VENV)/bin/python benchmarks/data.py --json
	$(VENV)/bin/python benchmarks/extraction.py --json
	$(VENV)/bin/python benchmarks/dag.py --json

# What is generated: the page on the configuration keys, the picture of the rule graph (needs Graphviz).
docs: $(STAMP)
	$(VENV)/bin/python docs/make_config_page.py
	$(VENV)/bin/python docs/make_rulegraph.py

$(STAMP): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[demo,test]'
	touch $(STAMP)

clean-venv:
	rm -rf $(VENV)
