# Every goal first sets up what it needs (tools/setup.sh): nothing has to be installed but Python 3.10. make prints:
#
#   make demo          trains a small language model on several ranks into runs/demo, and prints what it writes
#   make tutorial      computes packed documents on 4 ranks, and compares each result with float64
#   make info          prints versions, GPUs, where libraries come from, and what is missing
#   make check         compares this machine's engine with float64, on every kind of pack, mask and method
#   make fuzz          compares random packs with float64 for a minute, on simulated ranks and under mpiexec
#   make advise        recommends how to spread a pack over ranks
#   make pack-stats    recommends how many documents a CUDA graph should hold
#   make test          runs the tests that need no GPU, on up to 4 cores
#   make gpu-test      runs the tests that need a GPU
#   make lint          runs ruff and mypy
#   make docs          writes the API reference, from the docstrings, into build/docs
#
#   ARGS passes options to the program, as in:
#     make demo ARGS="--steps 300 --plot curve.png"
#     make advise ARGS="--lengths 64x1024 --ranks 8"
#     make pack-stats ARGS="--data DIR --tokens 16384"
#     make fuzz ARGS="--seconds 600 --seed 1"
#     make test ARGS="-n 0 -k sharding"
#     make test ARGS="-m exhaustive"     repeats the tests on more ranks, packs, head dims and GPUs
#   PYTHON chooses the interpreter, and RANKS the number of ranks of demo and tutorial.

PYTHON ?= python3
ARGS ?=

export PYTHON RANKS
export PYTHONPATH := src$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help demo tutorial check fuzz info pack-stats advise test gpu-test lint docs

help:
	@sed -n '3,/^$$/s/^#\( \{3\}\)\{0,1\}//p' Makefile

demo:
	@python=$$(tools/setup.sh demo) && exec "$$python" tools/demo.py $(ARGS)

tutorial:
	@python=$$(tools/setup.sh demo) && exec env RANKS="$${RANKS:-4}" \
	  "$$python" tools/start.py examples/packed_documents.py --ranks "$${RANKS:-4}" $(ARGS)

check:
	@python=$$(tools/setup.sh check) && exec "$$python" -m thdattn check $(ARGS)

fuzz:
	@python=$$(tools/setup.sh check) && "$$python" -m thdattn fuzz --seconds 30 $(ARGS) \
	  && exec "$$python" tools/start.py -m thdattn fuzz --seconds 30 $(ARGS)

info:
	@python=$$(tools/setup.sh check) && exec "$$python" -m thdattn info

pack-stats:
	@python=$$(tools/setup.sh demo) && exec "$$python" -m thdattn pack-stats $(ARGS)

advise:
	@python=$$(tools/setup.sh demo) && exec "$$python" -m thdattn advise $(ARGS)

test:
	@python=$$(tools/setup.sh test) && exec "$$python" -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

gpu-test:
	@python=$$(tools/setup.sh test) && exec "$$python" -m pytest -m gpu $(ARGS)

lint:
	@python=$$(tools/setup.sh lint) && "$$python" -m ruff check . && exec "$$python" -m mypy

docs:
	@python=$$(tools/setup.sh docs) && exec "$$python" tools/docs.py build/docs
