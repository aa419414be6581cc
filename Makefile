# make demo   set up, then the demo model writes text through Kompute
# make test   set up, lint and run the tests
PROMPT ?= It is a truth universally acknowledged, that
DEVICE ?= kompute

.PHONY: setup demo test lint clean

setup:
	@bash scripts/setup.sh

demo: setup
	.venv/bin/vkbackend generate --demo --device $(DEVICE) -p "$(PROMPT)" -n 64 --temp 0.7 --top-p 0.9 --seed 7 --stats
	@echo "--- the same text with speculation: the model's own MTP block drafts, the trunk verifies"
	.venv/bin/vkbackend generate --demo --device $(DEVICE) -p "$(PROMPT)" -n 64 --temp 0.7 --top-p 0.9 --seed 7 --stats \
		--spec-type draft-mtp --spec-draft-n-max 3
	@echo "--- fewer steps are less time on a GPU; on a CPU driver (as the device line says) speculation costs time"

test: setup lint
	.venv/bin/python -m pytest -q

lint: setup
	.venv/bin/ruff check .
	@bash scripts/typecheck.sh

clean:
	rm -rf .venv build *.egg-info shaders/spv
