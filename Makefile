# k3: plain `make` builds build/k3; `make help` lists the rest. V=1 shows the commands.
#
# CC, CFLAGS, LDFLAGS and BUILD are yours. The flags that fix the bits (docs/NUMERICS.md 1)
# come after yours and win; instruction sets are chosen at run time, so no -march is needed.

CC     ?= cc
CFLAGS ?= -O3 -g
BUILD  ?= build
PREFIX ?= /usr/local
V      ?= 0
Q       = $(if $(filter 1,$(V)),,@)
say     = @echo "  $(1)"

# The bits: C99, no contraction, no fast-math. The last two change no value and let rintf,
# sqrtf and llrintf become instructions.
K3_BITS = -std=c99 -D_GNU_SOURCE -fno-fast-math -ffp-contract=off -fno-math-errno \
          -fno-trapping-math
K3_WARN = -Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes -Wmissing-prototypes
K3_LIBS = $(K3_CURL) -luring -ljson-c -lzstd -lssl -lcrypto -lpthread -lm

# libcurl dials far boxes. With CURL=0, and in static programs, the client dials by itself and has neither TLS nor
# proxies.
CURL    ?= $(if $(filter -static,$(LDFLAGS)),0,1)
K3_CURL := $(if $(filter 0,$(CURL)),,$(or $(shell pkg-config --libs libcurl 2>/dev/null),-lcurl))

# Line editing in `k3 chat`, where libedit is installed; without it lines are read as they come.
K3_EDIT := $(shell echo 'int el_init(void); int main(void) { return el_init(); }' | \
             $(CC) $(LDFLAGS) -x c -o /dev/null - -ledit 2>/dev/null && echo edit)

# `k3 serve`, where libmicrohttpd is installed; with SERVE=0, and in static programs, there is none.
SERVE   ?= $(if $(filter -static,$(LDFLAGS)),0,1)
K3_HTTP := $(if $(filter 0,$(SERVE)),,$(shell echo 'int MHD_get_version(void); int main(void) { return MHD_get_version(); }' | \
             $(CC) $(LDFLAGS) -x c -o /dev/null - -lmicrohttpd 2>/dev/null && echo microhttpd))

# What the k3 program links beside the engine's libraries.
CLI_LIBS = $(K3_EDIT:%=-l%) $(K3_HTTP:%=-l%)

# The kernel sets of the machine that k3 is built for. Only a set's own file is compiled with its flags.
K3_TARGET := $(shell $(CC) -dumpmachine 2>/dev/null)
K3_SETS   := $(if $(filter x86_64%,$(K3_TARGET)),avx2 avx512,$(if $(filter aarch64%,$(K3_TARGET)),neon))
K3_FLAGS_avx2   = -mavx2 -mfma
K3_FLAGS_avx512 = -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma \
                  -mprefer-vector-width=512
K3_FLAGS_neon   =

# The GPU arm of k3-tier: built by `make gpu`, and by every later make of the same BUILD; GPU=0 leaves it out.
GPU        ?= $(if $(wildcard $(BUILD)/gpu_tier.o),1)
K3_GPU     := $(filter-out 0,$(GPU))
NVCC       ?= $(or $(shell command -v nvcc),/usr/local/cuda/bin/nvcc)
CUDA_HOME  ?= $(patsubst %/bin/nvcc,%,$(NVCC))
NVCC_BITS   = -std=c++17 --fmad=false --ftz=false --prec-div=true --prec-sqrt=true
GPU_KNOWN   = $(shell $(NVCC) --list-gpu-arch 2>/dev/null)
GPU_ARCHS  ?= $(foreach n,80 89 90 100 120,$(if $(filter compute_$(n),$(GPU_KNOWN)),$(n)))
GPU_LIBS    = -L$(CUDA_HOME)/lib64 -lcudart_static -lstdc++ -ldl -lrt
GPU_OBJECTS = $(BUILD)/gpu_tier.o $(BUILD)/gpu_bench.o

ALL_CFLAGS = -I. $(CFLAGS) $(K3_BITS) $(K3_WARN) $(K3_SAN) $(K3_SETS:%=-DK3_HAVE_%) -MMD -MP
ALL_CFLAGS += $(if $(K3_CURL),-DK3_CURL) $(if $(K3_HTTP),-DK3_HTTP)
# Where k3 looks for the bundled model, in the source tree and installed; and the commit it was built from
# (COMMIT= for a source tree that is no git checkout).
COMMIT     ?= $(shell test -e .git && git describe --always --dirty --abbrev=12 --exclude '*' 2>/dev/null)
PLACE_DIRS := -DK3_SOURCE_DIR='"$(CURDIR)"' -DK3_BUILD_DIR='"$(abspath $(BUILD))"' \
              -DK3_SHARE_DIR='"$(PREFIX)/share/k3"' $(if $(COMMIT),-DK3_COMMIT='"$(COMMIT)"')

KERNELS = $(K3_SETS:%=$(BUILD)/kernels_%.o)
PARTS   = $(BUILD)/k3_ledger.o $(BUILD)/k3_sums.o $(BUILD)/k3_sample.o $(BUILD)/k3_mla.o $(BUILD)/k3_model.o $(BUILD)/k3_disk.o $(BUILD)/k3_temp.o $(BUILD)/k3_resume.o $(BUILD)/experts.o $(BUILD)/k3_pool.o $(BUILD)/k3_machine.o $(BUILD)/tier_client.o $(BUILD)/tier_dial.o $(KERNELS)
ENGINE  = $(BUILD)/k3.o $(BUILD)/k3_text.o $(BUILD)/k3_state.o $(PARTS)
# The k3 program: CLI is linked into tests too, CLI_MAIN only into k3.
CHAT     = json xtml messages talk show chat_commands edit chat
CLI      = $(patsubst %,$(BUILD)/cli/%.o,console output options args inputs generate drafts screen place gpu \
             run bench bench_kernels bench_sessions replay reader hop where verify resume plan forecast info tokenize cache \
             slice $(CHAT) calls complete $(if $(K3_HTTP),http page serve))
CLI     += $(BUILD)/draft_ngram.o $(BUILD)/draft_gate.o
CLI_MAIN = $(patsubst %,$(BUILD)/cli/%.o,main help manual)
TESTS   = $(BUILD)/test_kernels $(BUILD)/test_text $(BUILD)/test_unicode $(BUILD)/test_engine $(BUILD)/test_model \
          $(BUILD)/test_stream $(BUILD)/test_state $(BUILD)/test_pass $(BUILD)/test_mla $(BUILD)/test_xtml $(BUILD)/test_tier \
          $(BUILD)/test_stage $(BUILD)/test_vram $(BUILD)/test_dial $(BUILD)/test_pool $(BUILD)/test_machine $(BUILD)/tier_chaos $(BUILD)/tls_bad \
          $(BUILD)/k3-tier-fake
TESTS  += $(BUILD)/test_screen $(BUILD)/test_forecast $(BUILD)/test_options $(BUILD)/test_draft $(BUILD)/libk3.a
REPLAYS = $(BUILD)/replay_text $(BUILD)/replay_config $(BUILD)/replay_header $(BUILD)/replay_index \
          $(BUILD)/replay_state $(BUILD)/replay_tier $(BUILD)/replay_slice

.PHONY: all gpu demo test test-long test-gpu test-model test-big asan tsan neon fuzz bench golden install \
        uninstall clean help always
all: $(BUILD)/k3 $(BUILD)/k3-tier

# Without a compiler only these targets work; `make demo` installs one.
ifeq ($(K3_TARGET),)
ifneq ($(filter-out demo help clean uninstall,$(or $(MAKECMDGOALS),all)),)
$(error there is no C compiler "$(CC)" here; `make demo` or `scripts/deps.sh build` installs one on Debian and Ubuntu)
endif
endif

help:
	@echo "make             build $(BUILD)/k3 ($(CC), $(K3_TARGET): ref $(K3_SETS)$(K3_EDIT:%= lib%)$(if $(K3_CURL), libcurl))"
	@echo "make gpu         the same, with the GPU arm of k3-tier (nvcc)"
	@echo "make demo        install what is missing, build, run the bundled model, say what to do next"
	@echo "make test        the tests that need no big weights and no network (under 5 minutes)"
	@echo "make test-long   the tests that take longer, or need root or the network"
	@echo "make test-gpu    the GPU arm against the CPU's bits (nvcc and a device)"
	@echo "make test-model  the tests of a real directory: MODEL=DIR"
	@echo "make test-big    exp, tanh, sigmoid over every f32 input; streaming at true"
	@echo "                 dimensions (half an hour, 24 GB of disk: BIG_DIR)"
	@echo "make asan tsan   the tests under AddressSanitizer + UBSan, ThreadSanitizer"
	@echo "make neon        cross-build for AArch64 and test under qemu-user"
	@echo "make fuzz        a minute on each fuzz target (clang)"
	@echo "make bench       tokens per second on the bundled model, then the kernels"
	@echo "make install     to PREFIX ($(PREFIX)), DESTDIR before it; make uninstall takes it away again"
	@echo "make clean       remove $(BUILD) and the other builds"
	@echo "Variables, the same for each of them: CC CFLAGS LDFLAGS BUILD PREFIX V=1; CURL=0: no TLS and no proxies to far boxes"

$(BUILD)/k3: $(CLI_MAIN) $(CLI) $(ENGINE)
	$(call say,LD   $@)
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $(filter %.c %.o,$^) $(CLI_LIBS) $(K3_LIBS)

$(BUILD)/k3-tier: $(BUILD)/tier_server$(if $(K3_GPU),_gpu).o $(if $(K3_GPU),$(GPU_OBJECTS)) $(BUILD)/tier_tls.o \
  $(BUILD)/cli/place.o $(ENGINE)
	$(call say,LD   $@)
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $(filter %.c %.o,$^) $(K3_LIBS) $(if $(K3_GPU),$(GPU_LIBS))

gpu:
	$(Q)command -v "$(NVCC)" >/dev/null || { echo "make gpu: no nvcc; install the CUDA toolkit 12.4 or \
	newer, or say NVCC=PATH"; exit 1; }
	$(Q)$(MAKE) --no-print-directory GPU=1 all

$(BUILD)/tier_server_gpu.o: tier_server.c | $(BUILD)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -DK3_HAVE_GPU -c -o $@ $<

$(BUILD)/gpu_bench.o: gpu_bench.c | $(BUILD)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -DK3_HAVE_GPU -c -o $@ $<

$(BUILD)/gpu_tier.o: gpu_tier.cu gpu_tier.h kernels.h | $(BUILD)
	$(call say,NVCC $<)
	$(Q)$(NVCC) -O3 $(NVCC_BITS) -DK3_HAVE_GPU $(foreach n,$(GPU_ARCHS),-gencode=arch=compute_$(n),code=sm_$(n)) \
	  -gencode=arch=compute_$(lastword $(GPU_ARCHS)),code=compute_$(lastword $(GPU_ARCHS)) -c -o $@ $<

# The server with its part of the GPU arm, and a CPU that plays the GPU.
$(BUILD)/k3-tier-fake: tests/fake_gpu.c $(BUILD)/tier_server_gpu.o $(BUILD)/tier_tls.o $(BUILD)/cli/place.o $(ENGINE)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -DK3_HAVE_GPU $(LDFLAGS) -o $@ $(filter %.c %.o,$^) $(K3_LIBS)

$(BUILD)/test_gpu: tests/test_gpu.c $(GPU_OBJECTS) $(BUILD)/k3.o $(PARTS)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -DK3_HAVE_GPU $(LDFLAGS) -o $@ $(filter %.c %.o,$^) $(K3_LIBS) $(GPU_LIBS)

$(BUILD)/kernels_%.o: kernels_%.c | $(BUILD)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) $(K3_FLAGS_$*) -c -o $@ $<

$(BUILD)/cli/place.o: cli/place.c | $(BUILD)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) $(PLACE_DIRS) -c -o $@ $<

# struct edit_state differs with libedit, so both files that use it are compiled with the same flag.
LINES = $(BUILD)/cli/chat.o $(BUILD)/cli/edit.o
$(LINES): $(BUILD)/cli/%.o: cli/%.c | $(BUILD)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) $(K3_EDIT:%=-DK3_HAVE_lib%) -c -o $@ $<

$(BUILD)/%.o: %.c | $(BUILD)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -c -o $@ $<

# Tests that include the file under test; static functions that they do not use are no fault.
$(BUILD)/test_engine: $(BUILD)/%: tests/%.c $(filter-out %/k3_sample.o,$(PARTS))
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $< $(filter %.o,$^) $(K3_LIBS)

$(BUILD)/test_mla: tests/test_mla.c $(BUILD)/k3.o $(PARTS)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $< $(BUILD)/k3.o $(PARTS) $(K3_LIBS)

$(BUILD)/test_pass: tests/test_pass.c $(BUILD)/k3_state.o $(PARTS)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $< $(BUILD)/k3_state.o $(PARTS) $(K3_LIBS)

# It includes k3_ledger.c too, to make its mmap fail.
$(BUILD)/test_stream: tests/test_stream.c $(filter-out %/k3_ledger.o,$(PARTS))
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $< $(filter %.o,$^) $(K3_LIBS)

# These include k3_model.c too; test_model also k3_disk.c, to make its reads fail.
BUT_MODEL = $(filter-out %/k3_model.o,$(PARTS))
$(BUILD)/test_model: tests/test_model.c $(filter-out %/k3_disk.o %/k3_sums.o,$(BUT_MODEL))
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $< $(filter %.o,$^) $(K3_LIBS)

# guard bounds each test and ends what the test started. It is never built with a sanitizer.
$(BUILD)/guard: tests/guard.c | $(BUILD)
	$(call say,CC   $<)
	$(Q)$(CC) -std=c99 -D_GNU_SOURCE -O1 $(K3_WARN) -o $@ $<

$(BUILD)/tier_chaos: tests/tier_chaos.c | $(BUILD)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $< -lcrypto

$(BUILD)/tls_bad: tests/tls_bad.c | $(BUILD)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $< -lssl -lcrypto

# These include tier_server.c and link the engine.
$(BUILD)/test_tier $(BUILD)/test_stage: $(BUILD)/%: tests/%.c tier_server.c $(BUILD)/tier_tls.o $(ENGINE)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $< $(BUILD)/tier_tls.o $(ENGINE) $(K3_LIBS)

$(BUILD)/test_vram: tests/test_vram.c tests/fake_gpu.c tier_server.c $(BUILD)/tier_tls.o $(ENGINE)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -DK3_HAVE_GPU -Wno-unused-function $(LDFLAGS) -o $@ $< tests/fake_gpu.c \
	  $(BUILD)/tier_tls.o $(ENGINE) $(K3_LIBS)

# It includes tier_tls.c.
$(BUILD)/test_dial: tests/test_dial.c $(BUILD)/tier_dial.o
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $< $(BUILD)/tier_dial.o $(K3_LIBS)

# It includes client and server, so the client's object is not linked.
$(BUILD)/replay_tier: tests/fuzz_tier.c tests/fuzz_replay.c tier_server.c tier_client.c tier_keep.h \
  tier.h slice.h experts.h $(BUILD)/k3.o $(BUILD)/k3_ledger.o $(BUILD)/k3_sums.o $(BUILD)/k3_sample.o $(BUILD)/k3_mla.o $(BUILD)/k3_model.o $(BUILD)/k3_disk.o $(BUILD)/k3_temp.o $(BUILD)/k3_resume.o $(BUILD)/experts.o $(BUILD)/k3_pool.o $(BUILD)/k3_machine.o \
  $(BUILD)/tier_dial.o $(BUILD)/tier_tls.o $(KERNELS)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ tests/fuzz_tier.c \
	  tests/fuzz_replay.c $(filter %.o,$^) $(K3_LIBS)

$(BUILD)/test_state: tests/test_state.c $(BUILD)/k3_state.o $(PARTS)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $< $(filter %.o,$^) $(K3_LIBS)

$(BUILD)/test_xtml: tests/test_xtml.c $(filter-out $(patsubst %,$(BUILD)/cli/%.o,$(CHAT)),$(CLI)) $(ENGINE)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $< $(filter %.o,$^) $(CLI_LIBS) $(K3_LIBS)

$(BUILD)/test_screen: tests/test_screen.c $(BUILD)/cli/screen.o
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $< $(BUILD)/cli/screen.o

$(BUILD)/test_forecast $(BUILD)/test_options $(BUILD)/test_draft: $(BUILD)/%: tests/%.c $(CLI) $(ENGINE)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $(filter %.c %.o,$^) $(CLI_LIBS) $(K3_LIBS)

$(BUILD)/test_text: tests/test_text.c | $(BUILD)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $< $(K3_LIBS)

$(BUILD)/test_unicode: tests/test_unicode.c $(BUILD)/k3_text.o
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $(filter %.c %.o,$^) $(K3_LIBS)

$(BUILD)/test_kernels: tests/test_kernels.c $(BUILD)/k3.o $(PARTS)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $(filter %.c %.o,$^) $(K3_LIBS)

$(BUILD)/test_pool: tests/test_pool.c $(BUILD)/k3_pool.o
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $(filter %.c %.o,$^) -lpthread

$(BUILD)/test_machine: tests/test_machine.c $(BUILD)/k3_machine.o
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $(filter %.c %.o,$^)

# These include no engine, so what was cut out of it is not linked.
$(BUILD)/replay_text $(BUILD)/replay_slice: $(BUILD)/replay_%: tests/fuzz_%.c tests/fuzz_replay.c \
  $(filter-out %/k3_sums.o %/k3_sample.o,$(BUT_MODEL))
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $(filter %.c %.o,$^) $(K3_LIBS)

$(BUILD)/replay_%: tests/fuzz_%.c tests/fuzz_replay.c $(BUT_MODEL)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $(filter %.c %.o,$^) $(K3_LIBS)

$(BUILD)/replay_state: tests/fuzz_state.c tests/fuzz_replay.c $(BUILD)/k3_state.o $(PARTS)
	$(call say,CC   $<)
	$(Q)$(CC) $(ALL_CFLAGS) -Wno-unused-function $(LDFLAGS) -o $@ $< tests/fuzz_replay.c \
	  $(filter %.o,$^) $(K3_LIBS)

$(BUILD):
	$(Q)mkdir -p $@ $@/cli $@/tier

# A second make, because the first one may have run before there was a compiler.
demo:
	$(Q)scripts/deps.sh build
	$(Q)scripts/deps.sh test || echo "make demo: some of what the tests use is missing; those tests are skipped"
	$(Q)$(MAKE) --no-print-directory all
	@echo "\$$ $(BUILD)/k3 run \"The capital of France is\""
	@$(BUILD)/k3 run "The capital of France is"
	@scripts/next.sh "$(BUILD)/k3"

test: all $(TESTS) $(REPLAYS) $(BUILD)/guard
	$(Q)CC="$(CC)" BUILD=$(BUILD) K3_SAN="$(K3_SAN)" K3_LIBS="$(K3_LIBS)" tests/run.sh $(TEST_ARGS)

test-long: all $(TESTS) $(REPLAYS) $(BUILD)/guard
	$(Q)CC="$(CC)" BUILD=$(BUILD) K3_SAN="$(K3_SAN)" K3_LIBS="$(K3_LIBS)" tests/run_long.sh $(TEST_ARGS)

test-gpu:
	$(Q)BUILD=$(BUILD) NVCC="$(NVCC)" tests/test_gpu.sh

test-model: all $(TESTS)
	$(Q)test -n "$(MODEL)" || { echo "make test-model MODEL=DIR"; exit 2; }
	$(Q)K3_TOKENIZER_DIR="$(MODEL)" $(BUILD)/test_text
	$(Q)K3_TOKENIZER_DIR="$(MODEL)" K3=$(BUILD)/k3 tests/test_chat.py --pins
	$(BUILD)/k3 info --model "$(MODEL)"
	$(BUILD)/k3 verify --golden --model "$(MODEL)"

test-big: all $(BUILD)/test_kernels
	$(BUILD)/test_kernels --big
	$(Q)BUILD=$(BUILD) tests/test_big.sh

# Builds with a sanitizer are slow, so they run the shortened tests.
asan:
	$(Q)$(MAKE) --no-print-directory test BUILD=$(BUILD)-asan TEST_ARGS=--quick \
	  CFLAGS="-O1 -g -fno-omit-frame-pointer" K3_SAN="-fsanitize=address,undefined -fno-sanitize-recover=undefined"

tsan:
	$(Q)$(MAKE) --no-print-directory test BUILD=$(BUILD)-tsan TEST_ARGS=--quick CC=clang \
	  CFLAGS="-O1 -g" K3_SAN=-fsanitize=thread

neon:
	$(Q)tests/test_neon.sh || test $$? -eq 77

fuzz:
	$(Q)tests/fuzz.sh 60

bench: all
	$(BUILD)/k3 bench
	$(BUILD)/k3 bench --kernels-only

# The golden values were made by other programs; this only compares with them.
golden: $(BUILD)/test_engine
	$(BUILD)/test_engine demo scripts tests/data

# The engine as a library: all that k3.h declares, and what it needs (k3.pc names the libraries).
$(BUILD)/libk3.a: $(ENGINE)
	$(call say,AR   $@)
	$(Q)rm -f $@
	$(Q)$(AR) rcs $@ $^

# Programs, man pages and completion (made from the option table), header, library, k3.pc, licence, the
# bundled model and the released config. uninstall removes exactly what install wrote.
INSTALL = BUILD="$(BUILD)" PREFIX="$(PREFIX)" DESTDIR="$(DESTDIR)" LIBS="$(K3_LIBS)" scripts/install.sh
install: all $(BUILD)/libk3.a
	$(Q)$(INSTALL) install
	@echo "installed in $(DESTDIR)$(PREFIX); k3 help"

uninstall:
	$(Q)$(INSTALL) uninstall

clean:
	rm -rf $(BUILD) $(BUILD)-asan $(BUILD)-tsan $(BUILD)-neon $(BUILD)-fuzz $(BUILD)-builds $(BUILD)-clang

# Each of these files holds the flags that some objects or programs are made with. It is written when they change,
# and what depends on it is then made again.
SAID_flags = $(CC) $(ALL_CFLAGS)
SAID_links = $(LDFLAGS) $(K3_LIBS) $(CLI_LIBS) gpu $(K3_GPU)
SAID_own   = edit $(K3_EDIT)
SAID_place = $(PLACE_DIRS)
SAID_nvcc  = $(NVCC) $(NVCC_BITS) $(GPU_ARCHS)
SAID       = '$(subst ','\'',$(SAID_$(@F)))'
$(KERNELS) $(ENGINE) $(CLI) $(CLI_MAIN) $(TESTS) $(REPLAYS) $(addprefix $(BUILD)/,tier_tls.o \
  tier_server.o tier_server_gpu.o gpu_bench.o test_gpu): $(BUILD)/flags
$(BUILD)/k3 $(BUILD)/k3-tier $(TESTS) $(REPLAYS): $(BUILD)/links
$(LINES): $(BUILD)/own
$(BUILD)/cli/place.o: $(BUILD)/place
$(BUILD)/gpu_tier.o: $(BUILD)/nvcc

$(addprefix $(BUILD)/,flags links own place nvcc): always | $(BUILD)
	$(Q)echo $(SAID) | cmp -s - $@ || echo $(SAID) >$@

-include $(wildcard $(BUILD)/*.d $(BUILD)/*/*.d)
