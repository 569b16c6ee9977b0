# The doorstep: plain pip and snakemake, in a virtual environment of this folder.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
STAMP = $(VENV)/.installed
# Two test files at a time, the long ones first: most of the time of a test one core is idle.
TOGETHER = -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo report test test-sglang test-speculators test-slurm test-browser test-faults lint docs bench clean-venv

# Prompts to a measured drafter, with the default configuration.
demo: $(STAMP)
	$(VENV)/bin/snakemake --cores all

# The report of a finished run, in a browser: of the default configuration, or CONFIG=config/smollm2.yaml.
report: $(STAMP)
	$(VENV)/bin/eyas report $(if $(CONFIG),--configfile '$(CONFIG)')

# The linters, then every test but those that need SGLang or SLURM, and some of the injected faults. Those in a browser
# are skipped where there is none.
test: $(STAMP) lint
	$(VENV)/bin/python -m pytest $(TOGETHER) --ignore tests/integration/sglang --ignore tests/integration/slurm

# The tests against real SGLang servers on the CPU, in an environment that is made first (four minutes, 2.6 GB).
test-sglang: $(STAMP)
	$(VENV)/bin/python tests/integration/sglang/make_environment.py
	$(VENV)/bin/python -m pytest tests/integration/sglang

# The exported vLLM form in the hands of speculators, in an environment that is made first (torch and 1 GB more).
test-speculators: $(STAMP)
	bash benchmarks/peers/setup.sh speculators
	$(VENV)/bin/python -m pytest tests/integration/test_speculators_load.py

# The tests on a real SLURM on the loopback interface, which is installed first (apt-get, as root) if it is not there.
test-slurm: $(STAMP)
	$(VENV)/bin/python tests/integration/slurm/cluster.py install
	$(VENV)/bin/python -m pytest tests/integration/slurm

# The report in a real browser: Chromium, which is installed first where it is missing (Debian, as root or with sudo).
test-browser: $(STAMP)
	$(VENV)/bin/python tests/integration/browser/set_up.py
	$(VENV)/bin/python -m pytest tests/integration/browser

# All injected faults; the table in docs/reliability.md is the last one. About an hour; `make test` tries some of each.
test-faults: $(STAMP)
	$(VENV)/bin/python -m pytest $(TOGETHER) tests/faults --faults all --faults-page docs/reliability.md

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
