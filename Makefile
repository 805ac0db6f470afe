# Two commands are enough on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard proto/flashsplit/*/v1/*.proto)
GENERATE := -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto

# Of all packages the versions that the tests passed with, so that a new release of one breaks nothing here.
INSTALL := $(BIN)/python -m pip install --quiet --constraint tests/versions.txt --editable
# A reference for tests that asks for an older transformers, and for audio and vision that its drafts have no use for.
REFERENCES := $(BIN)/python -m pip install --quiet --no-deps speculators hs-connectors

# Three tests at a time, one thread each, keep two cores busy: many of them wait for other processes. Files stay whole, as
# many of them share their workers. What some hundred processes import is compiled once, also where the environment says
# that Python is to keep nothing.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: demo serve test test-all lint docs proto versions bench clean

demo: $(VENV)/.run
	$(BIN)/flashsplit demo --model deploy/demo/target --draft deploy/demo/draft

serve: $(VENV)/.run
	$(BIN)/flashsplit serve --model deploy/demo/target --draft deploy/demo/draft --target-devices cpu,cpu

# What is quick, or stands for what is slow.
test: $(VENV)/.test
	$(PYTEST)

# With the tests that are marked slow: hours. Everything but what needs a GPU.
test-all: $(VENV)/.test
	$(PYTEST) -m 'not gpu'

lint: $(VENV)/.lint proto
	git diff --exit-code -- proto
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint proto

# The pages of docs/ as a site in site/; --strict ends it at a link that leads nowhere.
docs: $(VENV)/.docs
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/fields.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file .mkdocs.yml

# The stubs are committed; this writes them anew. Files of messages alone need no service stubs.
proto: $(VENV)/.lint
	$(BIN)/python $(GENERATE) $(PROTOS)
	@for stub in proto/flashsplit/*/v1/*_pb2_grpc.py; do grep -q 'Servicer' $$stub || rm $$stub; done

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# torch first and by its exact version: any other request brings gigabytes of CUDA packages to a CPU machine.
$(VENV)/.run: $(VENV)/bin/python pyproject.toml tests/versions.txt
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet torch==2.13.0
	$(INSTALL) '.[worker]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(INSTALL) '.[worker,test]'
	$(REFERENCES) --constraint tests/versions.txt
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(INSTALL) '.[worker,test,lint]'
	@touch $@

$(VENV)/.docs: $(VENV)/.run
	$(INSTALL) '.[worker,docs]'
	@touch $@

# The newest versions that pyproject.toml allows; the tests say whether they do. Of torch and what belongs to each of its
# builds the machine's own.
versions: $(VENV)/.lint
	$(BIN)/python -m pip freeze | grep '^torch==' > $(VENV)/torch.txt
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager --constraint $(VENV)/torch.txt \
		--editable '.[worker,test,lint]'
	$(REFERENCES) --upgrade
	$(BIN)/python -m pip freeze --exclude-editable | grep -vE '^(torch|triton)==' > tests/versions.txt

bench: $(VENV)/.run
	$(BIN)/python deploy/demo/prompts.py --out $(VENV)/prompts.json
	$(BIN)/flashsplit bench generate --model deploy/demo/target --draft deploy/demo/draft \
		--prompts $(VENV)/prompts.json --dtype float32

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache
