# `make help` lists the targets. The work is in scripts/, so that each part also runs alone.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

FUZZTIME ?= 30s
BENCH ?= .
BENCHCOUNT ?= 1

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: test
test: ## run the tests of every module
	@scripts/each go test ./...

.PHONY: race
race: ## run the tests of every module under the race detector
	@scripts/race

.PHONY: lint
lint: ## run golangci-lint over every module (.golangci.yml)
	@scripts/lint

.PHONY: bench
bench: ## run the root's benchmarks (BENCH=regexp BENCHCOUNT=10)
	@go test -run '^$$' -bench '$(BENCH)' -benchmem -count $(BENCHCOUNT) .

.PHONY: generate
generate: ## regenerate what is generated from proto/ and the test schema
	@scripts/generate

.PHONY: fuzz
fuzz: ## fuzz every target in turn (FUZZTIME=1m each)
	@scripts/fuzz $(FUZZTIME)

.PHONY: compat
compat: ## run the suite with the oldest and the newest Go, grpc and OpenTelemetry
	@scripts/compat

.PHONY: interop
interop: ## call nginx and a Node server, installing them if absent (INTEROP=-update rewrites docs/interop.md)
	@scripts/interop $(INTEROP)

.PHONY: check
check: check-format check-words vet check-tidy lint check-generated race check-seeds check-rename ## everything a change must pass; needs only Go
	@echo "check: all passed"

# The steps of check that are seldom wanted alone.

.PHONY: check-format
check-format: ## fail if gofmt would change a file
	@scripts/check-format

.PHONY: check-words
check-words: ## fail on machine paths, proxy hosts and left-over markers
	@scripts/check-words

.PHONY: vet
vet: ## go vet every module
	@scripts/each go vet ./...

.PHONY: check-tidy
check-tidy: ## fail if go mod tidy would change a module
	@scripts/each --all go mod tidy -diff

.PHONY: check-generated
check-generated: ## fail if generated code is not up to date
	@scripts/generate --check

.PHONY: check-seeds
check-seeds: ## run every fuzz target's corpus, and fail if one has none
	@scripts/fuzz --seeds

.PHONY: check-rename
check-rename: ## prove on a copy that the module can be renamed
	@scripts/rename-module --prove
