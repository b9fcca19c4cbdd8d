# Two commands are meant for everybody: make demo, make test. Both get what they need first.
.DEFAULT_GOAL := help
.PHONY: help build deps test unit demo lint bench faults update clean clean-cache

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
# As root the real-host tests must run; a missing part fails them instead of skipping.
HOSTS := $(if $(filter 0,$(shell id -u)),1,0)
# More flags for go test: make test TESTFLAGS=-v
TESTFLAGS ?=

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## Build ./tf-hosts
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=$(VERSION)" -o tf-hosts ./cmd/tf-hosts

deps: ## Get what is missing: Debian packages, OpenTofu, the hosts' base image
	@tools/deps

test: ## Run every test; as root on real hosts too
	@tools/deps tests
	go vet ./...
	@files=$$(git ls-files -co --exclude-standard '*.go' | xargs gofmt -l); \
	if [ -n "$$files" ]; then echo "not formatted by gofmt: $$files" >&2; exit 1; fi
	TF_HOSTS_REQUIRE_HOSTS=$(HOSTS) go test -timeout 20m $(TESTFLAGS) ./...

unit: ## Run the tests that need neither root nor hosts
	go test -short $(TESTFLAGS) ./...

demo: deps build ## Boot a state server and two hosts, and deploy to them
	go run ./internal/fleettest/demo

lint: ## Run golangci-lint (built once from tools/lint)
	"$$(tools/deps lint)" run ./...
	"$$(tools/deps lint)" fmt --diff

bench: deps ## Compare with bare OpenTofu; prints the ratios
	TF_HOSTS_REQUIRE_HOSTS=$(HOSTS) go test -run '^$$' -bench . -benchtime 1x -timeout 30m $(TESTFLAGS) ./...

faults: deps ## Run the tests that stop the program at each of its named operations
	TF_HOSTS_REQUIRE_HOSTS=$(HOSTS) go test -v -run 'Fault|CutMatrix' -count=1 -timeout 30m $(TESTFLAGS) ./...

update: ## Write the generated files that tests compare: goldens, the schema
	@dirs=$$(git grep -l 'flag.Bool("update"' -- '*_test.go' | xargs -rn1 dirname | sort -u | sed 's|^|./|'); \
	if [ -z "$$dirs" ]; then echo "no package has generated files"; else go test -count=1 $$dirs -update; git status --short; fi

clean: ## Remove the binary and what hosts of a broken run left behind
	rm -rf tf-hosts .demo
	@if [ "$$(id -u)" = 0 ]; then go run ./tools/hosts sweep; fi

clean-cache: clean ## Remove the cached base image, OpenTofu and golangci-lint too
	cache=$${TF_HOSTS_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/tf-hosts}; rm -rf "$$cache/image" "$$cache/tofu" "$$cache/lint"
