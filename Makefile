# `make pretrain` trains a small RecurrentGPT on this machine; `make test` runs the tests. Both set up .venv first.
# PYTHON=python3.12 and TORCH_INDEX=URL: see tools/environment.sh.
.PHONY: pretrain test test-full test-transformers4 lint clean
RUN := runs/demo

pretrain: .venv/.plots
	RUN=$(RUN) examples/demo.sh

test: .venv/.dev lint
	.venv/bin/python -m pytest

test-full: .venv/.dev
	.venv/bin/python -m pytest -m "full or not full"

# the exported model on the newest transformers 4 as well
test-transformers4: .venv/.dev
	tests/hf/transformers4.sh

lint: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv/.plots: setup.py constraints.txt tools/environment.sh
	tools/environment.sh plots
	touch $@

.venv/.dev: setup.py constraints.txt tools/environment.sh
	tools/environment.sh dev,data,plots
	touch $@ .venv/.plots

clean:
	rm -rf .venv runs data
