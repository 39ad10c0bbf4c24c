# Every goal sets up what it needs first (tools/setup.sh): nothing has to be installed beforehand but Python 3.10.
#
#   make demo                        trains a small language model across ranks into runs/demo, shows what it writes
#   make demo RANKS=2 ARGS="--steps 300 --plot curve.png"
#   make tutorial                    packed documents over 4 ranks, each result checked against float64
#   make check                       every kind of pack and mask on this machine's engine, against float64
#   make fuzz                        a minute of random packs against float64, on simulated ranks and under mpiexec
#   make fuzz ARGS="--seconds 600 --seed 1"             each of the two for ten minutes, with other cases
#   make info                        versions, GPUs, where libraries come from, what is missing
#   make pack-stats ARGS="--data DIR --tokens 16384"    documents per pack, and how many a CUDA graph should take
#   make advise ARGS="--lengths 64x1024 --ranks 8"      which way to spread a pack over ranks, and what each costs
#   make test                        tests that need no GPU, on up to 4 cores;  make gpu-test: those that need one
#   make test ARGS="-m exhaustive"   kernels compiled for more GPUs than Ampere's and Hopper's, in float16, in all ways
#   make lint                        ruff and mypy
#   make docs                        the API reference, from the docstrings, into build/docs
#
# PYTHON=... chooses the interpreter. ARGS=... is handed to the program.

PYTHON ?= python3
ARGS ?=

export PYTHON RANKS
export PYTHONPATH := src$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: demo tutorial check fuzz info pack-stats advise test gpu-test lint docs

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
	@python=$$(tools/setup.sh docs) && "$$python" -m pdoc --docformat google -o build/docs thdattn thdattn.torch \
	  && echo "wrote build/docs/index.html"
